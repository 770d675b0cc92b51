__version__ = "0.2.0"  # the only place with the version: the build reads it here

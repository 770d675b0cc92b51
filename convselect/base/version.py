__version__ = "0.1.0"  # the only place with the version: the build reads it here

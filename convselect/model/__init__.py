"""The Reformer: the network that ranks the pool for one problem, and everything that measures, trains and judges it.

`inference` and `host` are what a running program loads (numpy only, no training code); `reformer`, `dataset`,
`measure` and `train` are for making a new artifact.
"""

from __future__ import annotations

if __name__ != "convselect.model":  # the link at the top of the repository is for readers
    raise ImportError("import this package as convselect.model")

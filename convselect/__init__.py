"""convselect: a drop-in `nn.Conv2d` that picks the fastest correct way to do each convolution.

import convselect
convselect.convert(model)      # in place; the same model, faster
"""

from convselect import _log as _log  # its handler, where CONVSELECT_LOG asks for one
from convselect import distributed
from convselect import ops as ops  # registers the operators that a saved graph may hold
from convselect._predictor import unload
from convselect._remembered import configure as set_store
from convselect._warnings import ConvselectWarning
from convselect.convert import ConversionReport, convert, revert
from convselect.dispatch import clear
from convselect.enabled import disable, enable, enabled
from convselect.explain import Explanation, explain, explain_problem
from convselect.freeze import FreezeReport, freeze, unfreeze
from convselect.functional import conv2d
from convselect.kernels import Grade, NotApplicable
from convselect.layer import SelectedConv2d
from convselect.problem import ConvProblem, Direction
from convselect.settings import Settings, set_defaults, use

__version__ = "0.1.0"  # the one place: the build reads it here

__all__ = [
    "ConvProblem",
    "ConversionReport",
    "ConvselectWarning",
    "Direction",
    "Explanation",
    "FreezeReport",
    "Grade",
    "NotApplicable",
    "SelectedConv2d",
    "Settings",
    "__version__",
    "clear",
    "conv2d",
    "convert",
    "disable",
    "distributed",
    "enable",
    "enabled",
    "explain",
    "explain_problem",
    "freeze",
    "revert",
    "set_defaults",
    "set_store",
    "unfreeze",
    "unload",
    "use",
]

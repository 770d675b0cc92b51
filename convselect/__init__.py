"""convselect: a drop-in `nn.Conv2d` that picks the fastest correct way to do each convolution.

import convselect
model = convselect.convert(model)      # in place; the same model, faster
"""

from convselect import distributed
from convselect.base.lru import clear
from convselect.base.problem import ConvProblem, Direction
from convselect.base.settings import Settings, set_defaults, use
from convselect.base.version import __version__
from convselect.base.warnings import ConvselectWarning
from convselect.convert import convert, revert
from convselect.enabled import disable, enable, enabled
from convselect.explain import Explanation, explain, explain_problem
from convselect.freeze.freeze import freeze, unfreeze
from convselect.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from convselect.kernels._contract import Grade, NotApplicable
from convselect.layer import (
    SelectedConv1d,
    SelectedConv2d,
    SelectedConv3d,
    SelectedConvTranspose1d,
    SelectedConvTranspose2d,
    SelectedConvTranspose3d,
)
from convselect.model.loaded import unload
from convselect.store.process import configure as set_store
from convselect.summary import Summary, summary

__all__ = [
    "ConvProblem",
    "ConvselectWarning",
    "Direction",
    "Explanation",
    "Grade",
    "NotApplicable",
    "SelectedConv1d",
    "SelectedConv2d",
    "SelectedConv3d",
    "SelectedConvTranspose1d",
    "SelectedConvTranspose2d",
    "SelectedConvTranspose3d",
    "Settings",
    "Summary",
    "__version__",
    "clear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
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
    "summary",
    "unfreeze",
    "unload",
    "use",
]

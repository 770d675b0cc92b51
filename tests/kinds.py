"""The kinds of convolutions beside the 2-D one, for tests that run over all of them: `pytest.mark.parametrize("kind",
KINDS, ids=str)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import convselect


@dataclass(frozen=True)
class Kind:
    """One kind of convolution.

    Attributes:
        stock, selected: PyTorch's layer and ours.
        native, ours: PyTorch's function and ours.
        cases: name -> (x shape, weight shape, arguments of the function).
    """

    name: str
    dimensions: int
    transposed: bool
    stock: Any
    selected: Any
    native: Callable[..., torch.Tensor]
    ours: Callable[..., torch.Tensor]
    cases: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]

    def __str__(self) -> str:
        return self.name

    def x(self, *leading: int, size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An input with these leading sizes, batch and channels as a rule."""
        return torch.randn(*leading, *(size,) * self.dimensions, dtype=dtype)

    def pair_of(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
        """A stock layer and ours with the same parameters."""
        torch.manual_seed(0)
        stock, mine = self.stock(*args, **kwargs), self.selected(*args, **kwargs)
        mine.load_state_dict(stock.state_dict())
        return stock, mine

    def constructions(self) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]:
        """Arguments of layers: (in_channels, out_channels, kernel_size), and by name."""
        wide = (3, 2, 3)[: self.dimensions]
        common: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
            ((3, 6, 3), {}),
            ((3, 6, wide), {"stride": 2, "padding": 1, "bias": False}),
            ((4, 4, 3), {"groups": 4, "dtype": torch.float64}),
            ((3, 6, 1), {"stride": 2, "device": "cpu"}),
        )
        if self.transposed:
            return (*common, ((4, 6, 3), {"stride": 2, "output_padding": 1, "groups": 2, "dilation": 2}))
        return (
            *common,
            ((4, 6, 3), {"padding": "same", "dilation": 2, "groups": 2}),
            ((4, 4, 3), {"padding": "valid", "groups": 4}),
            ((3, 3, 3), {"padding": 1, "padding_mode": "circular"}),
        )

    def operands(self, case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
        """(x, weight, bias), arguments."""
        x, weight, arguments = self.cases[case]
        outputs = weight[1] * arguments.get("groups", 1) if self.transposed else weight[0]
        generator = torch.Generator().manual_seed(3)
        shapes = (x, weight, (outputs,))
        made = tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
        return made, arguments


CONV2D = Kind(
    "conv2d", 2, False, nn.Conv2d, convselect.SelectedConv2d, F.conv2d, convselect.conv2d,
    {
        "plain": ((2, 4, 8, 9), (6, 4, 3, 3), {"padding": 1}),
        "stride": ((2, 4, 8, 9), (6, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
        "groups": ((1, 4, 6, 7), (4, 2, 3, 3), {"groups": 2, "dilation": (1, 2)}),
        "same": ((2, 3, 5, 6), (4, 3, 2, 4), {"padding": "same"}),
        "unbatched": ((4, 6, 7), (6, 4, 3, 3), {}),
    },
)  # fmt: skip
CONV1D = Kind(
    "conv1d", 1, False, nn.Conv1d, convselect.SelectedConv1d, F.conv1d, convselect.conv1d,
    {
        "plain": ((2, 4, 19), (6, 4, 3), {"padding": 1}),
        "stride": ((2, 4, 19), (6, 4, 5), {"stride": 3, "padding": 2}),
        "groups": ((1, 4, 17), (4, 2, 3), {"groups": 2, "dilation": 2}),
        "depthwise": ((2, 4, 17), (4, 1, 5), {"groups": 4, "padding": (2,)}),
        "same": ((2, 3, 9), (4, 3, 4), {"padding": "same"}),
        "valid": ((2, 3, 9), (4, 3, 4), {"padding": "valid"}),
        "pointwise": ((2, 3, 9), (4, 3, 1), {}),
        "wide": ((1, 32, 11), (32, 32, 3), {"padding": 1}),
        "one channel": ((2, 1, 9), (1, 1, 3), {}),
        "unbatched": ((4, 11), (6, 4, 3), {"stride": (2,)}),
    },
)  # fmt: skip
TRANSPOSED2D = Kind(
    "conv_transpose2d", 2, True, nn.ConvTranspose2d, convselect.SelectedConvTranspose2d, F.conv_transpose2d,
    convselect.conv_transpose2d,
    {
        "plain": ((2, 6, 5, 6), (6, 4, 3, 3), {"padding": 1}),
        "twice": ((2, 6, 5, 6), (6, 4, 2, 2), {"stride": 2}),
        "wide": ((1, 32, 5, 6), (32, 32, 3, 3), {"padding": 1}),
        "stride": ((2, 6, 5, 6), (6, 4, 4, 3), {"stride": (2, 1), "padding": (1, 0)}),
        "output padding": ((2, 6, 3, 4), (6, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        "one of two": ((2, 6, 3, 4), (6, 4, 3, 3), {"stride": (3, 2), "output_padding": (2, 0)}),
        "groups": ((1, 4, 5, 6), (4, 3, 3, 3), {"groups": 2, "dilation": (1, 2), "stride": 2}),
        "depthwise": ((2, 4, 5, 6), (4, 1, 4, 4), {"groups": 4, "stride": 2, "padding": 1}),
        "wide padding": ((1, 3, 8, 8), (3, 2, 3, 3), {"padding": 4}),
        "unbatched": ((6, 5, 6), (6, 4, 3, 3), {"stride": [2, 2]}),
    },
)  # fmt: skip
TRANSPOSED1D = Kind(
    "conv_transpose1d", 1, True, nn.ConvTranspose1d, convselect.SelectedConvTranspose1d, F.conv_transpose1d,
    convselect.conv_transpose1d,
    {
        "plain": ((2, 6, 11), (6, 4, 3), {"padding": 1}),
        "stride": ((2, 6, 11), (6, 4, 16), {"stride": 8, "padding": 4}),
        "wide": ((1, 32, 11), (32, 32, 3), {"padding": 1}),
        "output padding": ((2, 6, 7), (6, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        "groups": ((1, 4, 7), (4, 3, 3), {"groups": 2, "dilation": 2, "stride": (2,)}),
        "unbatched": ((6, 5), (6, 4, 3), {"stride": 2}),
    },
)  # fmt: skip
CONV3D = Kind(
    "conv3d", 3, False, nn.Conv3d, convselect.SelectedConv3d, F.conv3d, convselect.conv3d,
    {
        "plain": ((2, 4, 4, 8, 9), (6, 4, 3, 3, 3), {"padding": 1}),
        "stride": ((2, 4, 5, 8, 9), (6, 4, 3, 3, 2), {"stride": (1, 2, 2), "padding": (1, 1, 0)}),
        "stride along the depth": ((1, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"stride": (2, 1, 1), "padding": (1, 0, 1)}),
        "groups": ((1, 4, 4, 6, 7), (4, 2, 2, 3, 3), {"groups": 2, "dilation": (2, 1, 2)}),
        "depthwise": ((1, 4, 4, 6, 7), (4, 1, 3, 3, 3), {"groups": 4, "padding": 1}),
        "same": ((2, 3, 4, 5, 6), (4, 3, 3, 2, 4), {"padding": "same"}),
        "valid": ((1, 3, 4, 5, 6), (4, 3, 2, 3, 3), {"padding": "valid"}),
        "pointwise": ((2, 4, 3, 5, 6), (6, 4, 1, 1, 1), {}),
        "along the depth": ((2, 4, 7, 3, 5), (6, 4, 3, 1, 1), {"padding": (1, 0, 0), "stride": (2, 1, 1)}),
        "an image": ((2, 4, 9, 3, 3), (6, 4, 3, 1, 1), {"padding": (1, 0, 0)}),
        "along the depth, same": ((1, 4, 7, 3, 5), (6, 4, 4, 1, 1), {"padding": "same"}),
        "one slice": ((2, 4, 1, 6, 7), (6, 4, 1, 3, 3), {"padding": (0, 1, 1)}),
        "slices": ((2, 4, 3, 6, 7), (6, 4, 1, 3, 3), {"padding": (0, 1, 1)}),
        "patches": ((1, 3, 4, 8, 8), (6, 3, 2, 4, 4), {"stride": (2, 4, 4)}),
        "one channel": ((2, 1, 4, 5, 6), (1, 1, 3, 3, 3), {}),
        "unbatched": ((4, 4, 6, 7), (6, 4, 3, 3, 3), {}),
        "unbatched slice": ((4, 1, 6, 7), (6, 4, 1, 3, 3), {}),
    },
)  # fmt: skip
TRANSPOSED3D = Kind(
    "conv_transpose3d", 3, True, nn.ConvTranspose3d, convselect.SelectedConvTranspose3d, F.conv_transpose3d,
    convselect.conv_transpose3d,
    {
        "plain": ((2, 6, 3, 5, 6), (6, 4, 3, 3, 3), {"padding": 1}),
        "twice": ((2, 6, 3, 4, 5), (6, 4, 2, 2, 2), {"stride": 2}),
        "stride": ((1, 6, 3, 5, 6), (6, 4, 3, 4, 3), {"stride": (1, 2, 1), "padding": (1, 1, 0)}),
        "output padding": ((2, 6, 2, 3, 4), (6, 4, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        "groups": ((1, 4, 3, 5, 6), (4, 3, 3, 3, 3), {"groups": 2, "dilation": (1, 2, 1), "stride": 2}),
        "along the depth": ((2, 6, 4, 3, 5), (6, 4, 3, 1, 1), {"stride": (2, 1, 1), "padding": (1, 0, 0)}),
        "an image": ((2, 6, 9, 3, 3), (6, 4, 3, 1, 1), {"padding": (1, 0, 0)}),
        "two slices of one": ((1, 6, 1, 3, 5), (6, 4, 1, 1, 1), {"stride": (2, 1, 1), "output_padding": (1, 0, 0)}),
        "one slice": ((2, 6, 1, 5, 6), (6, 4, 1, 2, 2), {"stride": (1, 2, 2)}),
        "unbatched": ((6, 3, 5, 6), (6, 4, 3, 3, 3), {"stride": [2, 2, 2]}),
    },
)  # fmt: skip
KINDS = (CONV2D, CONV1D, TRANSPOSED2D, TRANSPOSED1D, CONV3D, TRANSPOSED3D)
NEW = KINDS[1:]
CASES = [(kind, case) for kind in KINDS for case in kind.cases]

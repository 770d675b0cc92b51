"""The problem list that every algorithm is judged on: small, awkward, each with the reason it is here."""

from __future__ import annotations

import torch

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.base.volumes import volume_problem

PROBLEMS: dict[str, ConvProblem] = {
    "3x3": conv_problem(2, 8, 9, 9, 6, 3, 3, padding=1),
    "3x3 no padding": conv_problem(1, 5, 8, 11, 7, 3, 3),
    "3x3 wide padding": conv_problem(1, 3, 6, 5, 4, 3, 3, padding=4),
    "3x3 uneven padding": conv_problem(2, 3, 7, 6, 4, 3, 3, padding=(2, 0, 1, 3)),
    "3x3 many channels": conv_problem(1, 64, 14, 14, 48, 3, 3, padding=1),
    "3x3 odd image": conv_problem(3, 6, 13, 17, 10, 3, 3, padding=1),
    "one pixel": conv_problem(3, 4, 1, 1, 5, 3, 3, padding=1),
    "1x1 of few pixels": conv_problem(5, 6, 2, 3, 4, 1, 1),
    "one pixel 1x1": conv_problem(1, 7, 1, 1, 3, 1, 1),
    "one channel": conv_problem(2, 1, 10, 8, 4, 3, 3, padding=1),
    "one output channel": conv_problem(2, 4, 10, 8, 1, 3, 3, padding=1),
    "one of everything": conv_problem(1, 1, 1, 1, 1, 1, 1),
    "1x1": conv_problem(2, 16, 7, 9, 12, 1, 1),
    "1x1 groups": conv_problem(2, 12, 5, 6, 8, 1, 1, groups=4),
    "1x1 stride 2": conv_problem(2, 8, 9, 8, 6, 1, 1, stride=2),
    "1x1 stride over kernel, padded": conv_problem(1, 4, 9, 7, 3, 1, 1, stride=(3, 2), padding=2),
    "stride 2": conv_problem(2, 6, 12, 11, 8, 3, 3, stride=2, padding=1),
    "stride 2 leaves a rest": conv_problem(2, 3, 10, 10, 5, 3, 3, stride=2),
    "stride (3, 1)": conv_problem(1, 4, 13, 9, 6, 3, 3, stride=(3, 1), padding=1),
    "stride over kernel": conv_problem(2, 3, 11, 11, 4, 2, 2, stride=3),
    "stem 7x7 stride 2": conv_problem(1, 3, 32, 30, 16, 7, 7, stride=2, padding=3),
    "patch 4x4": conv_problem(2, 3, 16, 12, 8, 4, 4, stride=4),
    "patch with a rest": conv_problem(1, 3, 10, 11, 8, 4, 4, stride=4),
    "patch 2x2": conv_problem(1, 9, 6, 8, 10, 2, 2, stride=2),
    "4x4 stride 2": conv_problem(1, 9, 12, 14, 10, 4, 4, stride=2, padding=1),
    "patch groups": conv_problem(2, 4, 8, 8, 6, 2, 2, stride=2, groups=2),
    "whole image": conv_problem(3, 6, 5, 4, 9, 5, 4),
    "whole image groups": conv_problem(2, 6, 3, 3, 4, 3, 3, groups=2),
    "kernel over input": conv_problem(1, 3, 4, 3, 5, 7, 7, padding=3),
    "dilation 2": conv_problem(2, 4, 12, 11, 6, 3, 3, padding=2, dilation=2),
    "dilation 3, stride 2": conv_problem(1, 4, 15, 14, 4, 3, 3, padding=3, dilation=3, stride=2),
    "dilation (3, 1)": conv_problem(1, 3, 12, 9, 4, 3, 3, padding=(3, 1), dilation=(3, 1)),
    "groups 2": conv_problem(2, 8, 9, 8, 6, 3, 3, padding=1, groups=2),
    "groups, few channels": conv_problem(1, 32, 8, 8, 32, 3, 3, padding=1, groups=8),
    "depthwise 3x3": conv_problem(2, 12, 14, 13, 12, 3, 3, padding=1, groups=12),
    "depthwise 5x5 stride 2": conv_problem(1, 8, 15, 14, 8, 5, 5, stride=2, padding=2, groups=8),
    "depthwise 7x7": conv_problem(2, 6, 16, 15, 6, 7, 7, padding=3, groups=6),
    "depthwise 13x13": conv_problem(1, 4, 20, 21, 4, 13, 13, padding=6, groups=4),
    "depthwise multiplier 2": conv_problem(2, 5, 9, 9, 10, 3, 3, padding=1, groups=5),
    "depthwise multiplier 3, 5x5": conv_problem(1, 4, 11, 10, 12, 5, 5, padding=2, groups=4),
    "depthwise multiplier 3, dilated": conv_problem(1, 4, 12, 12, 12, 3, 3, padding=2, dilation=2, groups=4),
    "depthwise 3x3 no padding": conv_problem(2, 6, 8, 9, 6, 3, 3, groups=6),
    "depthwise uneven padding": conv_problem(1, 6, 9, 8, 6, 4, 4, padding="same", groups=6),
    "5x5": conv_problem(2, 4, 12, 13, 6, 5, 5, padding=2),
    "9x9": conv_problem(1, 3, 20, 18, 4, 9, 9, padding=4),
    "31x31": conv_problem(1, 2, 34, 33, 3, 31, 31, padding=15),
    "1xN": conv_problem(2, 4, 6, 19, 5, 1, 7, padding=(0, 3)),
    "Nx1": conv_problem(2, 4, 19, 6, 5, 7, 1, padding=(3, 0)),
    "even kernel, same": conv_problem(2, 3, 8, 9, 4, 2, 4, padding="same"),
    "even kernel, same, dilated": conv_problem(1, 3, 12, 11, 3, 4, 2, padding="same", dilation=(1, 3)),
    "one row": conv_problem(2, 3, 1, 40, 4, 3, 7, padding=(1, 3)),
    "one column": conv_problem(2, 3, 40, 1, 4, 3, 3, padding=1),
}

VOLUMES: dict[str, ConvProblem] = {
    "3x3x3": volume_problem(2, 8, 5, 9, 9, 6, 3, 3, 3, padding=1),
    "3x3x3 no padding": volume_problem(1, 5, 6, 8, 11, 7, 3, 3, 3),
    "3x3x3 uneven padding": volume_problem(2, 3, 4, 7, 6, 4, 3, 3, 3, padding=(1, 0, 2, 0, 1, 3)),
    "3x3x3 many channels": volume_problem(1, 32, 4, 10, 10, 24, 3, 3, 3, padding=1),
    "3x3x3 wide padding": volume_problem(1, 3, 2, 4, 5, 4, 3, 3, 3, padding=3),
    "3x3x3 one channel": volume_problem(2, 1, 6, 10, 8, 4, 3, 3, 3, padding=1),
    "3x3x3 one output channel": volume_problem(1, 4, 5, 6, 7, 1, 3, 3, 3, padding=1),
    "3x3x3 stride 2": volume_problem(2, 6, 7, 12, 11, 8, 3, 3, 3, stride=2, padding=1),
    "3x3x3 stride (1, 2, 2)": volume_problem(1, 4, 5, 9, 9, 6, 3, 3, 3, stride=(1, 2, 2), padding=1),
    "3x3x3 stride (2, 1, 1)": volume_problem(1, 4, 7, 8, 9, 6, 3, 3, 3, stride=(2, 1, 1), padding=1),
    "3x3x3 dilation 2": volume_problem(1, 4, 9, 11, 10, 6, 3, 3, 3, padding=2, dilation=2),
    "3x3x3 dilation (2, 1, 1)": volume_problem(2, 4, 8, 9, 7, 6, 3, 3, 3, padding=(2, 1, 1), dilation=(2, 1, 1)),
    "3x3x3 groups 2": volume_problem(2, 8, 4, 9, 8, 6, 3, 3, 3, padding=1, groups=2),
    "3x3x3 one slice": volume_problem(2, 4, 1, 9, 8, 6, 3, 3, 3, padding=1),
    "3x3x3 one voxel": volume_problem(3, 4, 1, 1, 1, 5, 3, 3, 3, padding=1),
    "1x3x3": volume_problem(2, 6, 4, 9, 10, 8, 1, 3, 3, padding=(0, 1, 1)),
    "1x3x3 stride (1, 2, 2)": volume_problem(1, 6, 4, 9, 10, 8, 1, 3, 3, stride=(1, 2, 2), padding=(0, 1, 1)),
    "1x3x3 stride (2, 1, 1)": volume_problem(1, 6, 5, 9, 10, 8, 1, 3, 3, stride=(2, 1, 1), padding=(0, 1, 1)),
    "3x1x1": volume_problem(2, 6, 7, 5, 6, 8, 3, 1, 1, padding=(1, 0, 0)),
    "3x1x1 stride (2, 1, 1)": volume_problem(1, 6, 7, 5, 6, 8, 3, 1, 1, stride=(2, 1, 1), padding=(1, 0, 0)),
    "7x1x1 padded all round": volume_problem(1, 4, 9, 5, 6, 3, 7, 1, 1, padding=(3, 1, 0)),
    "1x1x1": volume_problem(2, 16, 4, 5, 6, 12, 1, 1, 1),
    "1x1x1 stride 2": volume_problem(2, 8, 5, 7, 6, 6, 1, 1, 1, stride=2),
    "1x1x1 padded depth": volume_problem(1, 4, 3, 5, 6, 3, 1, 1, 1, padding=(1, 0, 0)),
    "5x5x5": volume_problem(1, 3, 8, 12, 13, 4, 5, 5, 5, padding=2),
    "stem 7x7x7 stride 2": volume_problem(1, 1, 12, 18, 17, 8, 7, 7, 7, stride=2, padding=3),
    "stem 3x7x7 stride (1, 2, 2)": volume_problem(1, 3, 4, 18, 17, 8, 3, 7, 7, stride=(1, 2, 2), padding=(1, 3, 3)),
    "patch 2x4x4": volume_problem(2, 3, 8, 12, 16, 8, 2, 4, 4, stride=(2, 4, 4)),
    "patch 4x4x4, one channel": volume_problem(1, 1, 12, 8, 16, 8, 4, 4, 4, stride=4),
    "patch with a rest": volume_problem(1, 3, 5, 10, 11, 8, 2, 4, 4, stride=(2, 4, 4)),
    "2x2x2 stride 2": volume_problem(1, 9, 6, 6, 8, 10, 2, 2, 2, stride=2),
    "depthwise 3x3x3": volume_problem(2, 12, 6, 9, 10, 12, 3, 3, 3, padding=1, groups=12),
    "depthwise 5x5x5 stride 2": volume_problem(1, 8, 9, 11, 10, 8, 5, 5, 5, stride=2, padding=2, groups=8),
    "depthwise 7x7x7": volume_problem(1, 4, 8, 10, 9, 4, 7, 7, 7, padding=3, groups=4),
    "depthwise 1x3x3": volume_problem(2, 6, 4, 9, 8, 6, 1, 3, 3, padding=(0, 1, 1), groups=6),
    "depthwise multiplier 2": volume_problem(1, 5, 4, 9, 9, 10, 3, 3, 3, padding=1, groups=5),
    "even kernel, same": volume_problem(2, 3, 6, 8, 9, 4, 2, 4, 2, padding="same"),
    "one row": volume_problem(1, 3, 5, 1, 20, 4, 3, 3, 3, padding=1),
}
"""The same in three dimensions."""

LAYOUTS = ("contiguous", "channels_last", "expanded", "channel_slice", "offset", "transposed")


def random_operands(
    problem: ConvProblem, layout: str = "contiguous", weight_layout: str = "contiguous", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, grad_y) for a problem: standard normal, weight scaled by fan-in so that y is of order one."""
    generator = torch.Generator().manual_seed(seed)
    p = problem

    def draw(shape: tuple[int, ...], how: str) -> torch.Tensor:
        return arranged(torch.randn(shape, generator=generator, dtype=torch.float64).to(p.torch_dtype), how)

    fan_in = max(1, p.C // p.groups * p.T * p.R * p.S)
    weight = draw(p.weight_shape, weight_layout)
    if weight_layout != "expanded":
        weight.mul_(fan_in**-0.5)
    return draw(p.x_shape, layout), weight, draw(p.y_shape, layout)


def arranged(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same shape in one of the memory arrangements that callers produce; values equal except for "expanded"."""
    N, C, *size = tensor.shape
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    if how == "channels_last":
        return torch.empty_like(tensor, memory_format=last).copy_(tensor)
    if how == "expanded":
        return tensor[:1, :1].expand(N, C, *size)
    if how == "channel_slice":
        wide = torch.full((N, 2 * C + 1, *size), float("nan"), dtype=tensor.dtype).contiguous(memory_format=last)
        wide[:, 1 : C + 1] = tensor
        return wide[:, 1 : C + 1]
    if how == "offset":
        flat = torch.full((tensor.numel() + 1,), float("nan"), dtype=tensor.dtype)
        flat[1:] = tensor.reshape(-1)
        return flat[1:].view(tensor.shape)
    if how == "transposed":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    assert how == "contiguous", how
    return tensor.contiguous()


def operands_of(problem: ConvProblem, x: torch.Tensor, weight: torch.Tensor, grad_y: torch.Tensor):
    """The two operands of the problem's direction, in the order the contract has them."""
    if problem.direction == Direction.FORWARD:
        return x, weight
    return (grad_y, weight) if problem.direction == Direction.BACKWARD_DATA else (x, grad_y)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error; NaN if `got` has any."""
    scale = want.double().norm().item()
    difference = (got.double() - want.double()).norm().item()
    return difference / scale if scale > 0 else difference

"""Problems of three dimensions: from arguments like those of `nn.Conv3d`, and as problems of images."""

from __future__ import annotations

from collections.abc import Sequence

from convselect.base.problem import CONTIGUOUS, STRIDED, ConvProblem, Direction, padding_sides, triple


def volume_problem(
    N: int,
    C: int,
    D: int,
    H: int,
    W: int,
    K: int,
    T: int,
    R: int,
    S: int,
    *,
    direction: Direction | str = Direction.FORWARD,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    **rest: object,
) -> ConvProblem:
    """Build a problem from arguments like `nn.Conv3d`: ints or triples, `padding="same"`, or (front, back, top, bottom,
    left, right).

    Raises:
        ValueError: for a padding string other than "same" and "valid".
    """
    stride_d, stride_h, stride_w = triple(stride)
    dil_d, dil_h, dil_w = triple(dilation)
    front, back, top, bottom, left, right = padding_sides(padding, (T, R, S), (dil_d, dil_h, dil_w))
    return ConvProblem(
        Direction(direction), N, C, H, W, K, R, S, stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups,
        D=D, T=T, stride_d=stride_d, pad_front=front, pad_back=back, dil_d=dil_d, **rest,  # type: ignore[arg-type]
    )  # fmt: skip


def image_of(problem: ConvProblem) -> ConvProblem | None:
    """The problem of images that is this one of volumes, on views of operands that are dense: of one slice and one
    depth tap that slice's; of a kernel T x 1 x 1 that of T x 1 on images of D rows and H * W columns. None if there is
    none. What is not dense is made contiguous for it."""
    p = problem
    if p.is_volume:
        along_depth = p.R == p.S == p.stride_h == p.stride_w == p.dil_h == p.dil_w == 1 and not any(p.padding)
        if not along_depth or (p.T == 1 and 1 in (p.D, p.O)):
            return None
        p = p._replace(
            H=p.D, W=p.H * p.W, R=p.T, stride_h=p.stride_d, pad_top=p.pad_front, pad_bottom=p.pad_back, dil_h=p.dil_d,
            dil_w=1, D=1, T=1, stride_d=1, pad_front=0, pad_back=0, dil_d=1,
        )  # fmt: skip
    dense = {name: CONTIGUOUS for name in ("layout", "weight_layout") if getattr(p, name) == STRIDED}
    return p._replace(**dense) if dense else p  # type: ignore[arg-type]


def volume_again(problem: ConvProblem, rows: tuple[int, int] | None) -> ConvProblem:
    """The problem whose `image_of` this one is."""
    p = problem
    if rows is None:
        return p
    return p._replace(
        H=rows[0], W=rows[1], R=1, stride_h=1, pad_top=0, pad_bottom=0, dil_h=1, D=p.H, T=p.R, stride_d=p.stride_h,
        pad_front=p.pad_top, pad_back=p.pad_bottom, dil_d=p.dil_h,
    )  # fmt: skip

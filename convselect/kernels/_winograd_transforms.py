"""The matrices of Winograd's minimal filtering F(m, 3), derived exactly by the Toom-Cook construction.

A polynomial g of degree 2 times a polynomial h of degree m - 1 is fixed by its values at a = m + 2 points, one of them
infinity: with V_n the (a x n) Vandermonde matrix of the points, its coefficients are V_a^-1 [(V_3 g) o (V_m h)].
Transposing that bilinear form in h (Winograd 1980; Barabasz et al. 2020, "Error analysis and improving the accuracy of
Winograd convolution for deep neural networks", section 2) gives correlation of d (a values) with g (3 taps):

    y = A^T [(G g) o (B^T d)],      A = V_m,  G = V_3,  B^T = V_a^-T,      y has m values.

Transposing it in g instead gives the weight gradient, F(3, m), from the same three matrices:

    grad_g = G^T [(A grad_y) o (B^T d)].
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Matrix = list[list[Fraction]]

R = 3
"""Taps of the kernel along one axis."""

POINTS: dict[int, tuple[Fraction, ...]] = {
    # Points in +- pairs around 0; infinity is added. The choice of pairs decides the rounding error, which grows with
    # the condition of the Vandermonde matrices. Found by a search over multiples of 1/8 (m = 4) and of 1/8 and 1/16
    # (m = 6) for the least float32 error of whole convolutions. For m = 4 the textbook's 0, 1, -1, 2, -2 has 2.2
    # times the error of these; for m = 6 nothing was better than the usual points.
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
    6: (Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2), Fraction(-1, 2)),
}


class Transforms(NamedTuple):
    """A^T (m x a), G (a x 3) and B^T (a x a), exact."""

    AT: Matrix
    G: Matrix
    BT: Matrix


class Arrays(NamedTuple):
    """The transforms in floating point, C-contiguous. Those of the weight are Kronecker products, which act on the 9
    taps of a kernel flattened row by row: so few that one product is as fast as two and rounds less."""

    BT: np.ndarray[Any, Any]
    """(a, a): input tile to transform domain, from either side."""
    AT: np.ndarray[Any, Any]
    """(m, a): transform domain to output tile, from either side."""
    GG: np.ndarray[Any, Any]
    """G x G, (a^2, 9): kernel to transform domain."""
    GG_flipped: np.ndarray[Any, Any]
    """The same for the kernel rotated by 180 degrees, (a^2, 9)."""


def _vandermonde(points: tuple[Fraction, ...], columns: int) -> Matrix:
    """Powers 0 .. columns - 1 of each point; the row of infinity picks the leading coefficient."""
    rows = [[point**power for power in range(columns)] for point in points]
    return [*rows, [Fraction(int(power == columns - 1)) for power in range(columns)]]


def _inverse(matrix: Matrix) -> Matrix:
    """Gauss-Jordan elimination in exact arithmetic."""
    size = len(matrix)
    rows = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column] != 0)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        lead = rows[column][column]
        rows[column] = [value / lead for value in rows[column]]
        for i in range(size):
            factor = rows[i][column]
            if i != column and factor != 0:
                rows[i] = [value - factor * other for value, other in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]


def _transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


@functools.cache
def transforms(m: int) -> Transforms:
    """A^T, G and B^T of F(m, 3), m in {2, 4, 6}.

    Rows of B^T are multiplied, and those of G divided, by what makes each row of B^T coprime integers over a power of
    two: then A and B^T hold dyadic fractions, exact in float32, and only G, applied to the weight, is rounded.
    """
    points, a = POINTS[m], m + R - 1
    G, BT = _vandermonde(points, R), _transposed(_inverse(_vandermonde(points, a)))
    for i, row in enumerate(BT):
        denominator = math.lcm(*(value.denominator for value in row))
        scale = Fraction(denominator, math.gcd(*(int(value * denominator) for value in row)))
        # Back near 1 by a power of two, which costs no rounding: keeps intermediate values in range.
        scale /= Fraction(2) ** round(math.log2(max(abs(value) * scale for value in row)))
        BT[i] = [value * scale for value in row]
        G[i] = [value / scale for value in G[i]]
    return Transforms(_transposed(_vandermonde(points, m)), G, BT)


def _kronecker(matrix: Matrix) -> Matrix:
    return [[p * q for p in row for q in other] for row in matrix for other in matrix]


@functools.cache
def arrays(m: int, dtype: str) -> Arrays:
    """The transforms of F(m x m, 3 x 3) in "float32" or "float64", each entry rounded once.

    Arrays, not tensors: a tensor kept from one call to the next would carry the mode of the first call (inference,
    fake) into all later ones.
    """
    AT, G, BT = transforms(m)
    flipped = [row[::-1] for row in G]
    exact = (BT, AT, _kronecker(G), _kronecker(flipped))
    return Arrays(*(np.array([[float(v) for v in row] for row in matrix], dtype=np.dtype(dtype)) for matrix in exact))

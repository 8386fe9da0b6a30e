"""Sums that do not depend on how many rows are computed together, so that a code depends on its own token alone.

A matrix product adds in an order that its kernel chooses by the shape of the whole call. A coordinate near a threshold
could so get one code in a prefill and another in a step of one token. Two ways out are taken here: a sum whose order is
written down as element-wise additions, and products of numbers so short that every sum of them is exact in float32,
whatever the order (a float32 holds whole numbers up to 2**24).

A row u of root mean square 1 and a matrix of rows of length about 1 are cut into a high and a low part on binary grids:

    u  = high (multiples of 2**-8)  + low (of 2**-16)  + at most 2**-17
    R  = high (multiples of 2**-10) + low (of 2**-16)  + at most 2**-17

By Cauchy and Schwarz every partial sum of high x high is at most |u| |R row| <= sqrt(width) x 1.09, which is less than
2**24 steps of 2**-18 for widths to 2048; low x high and high x low likewise. low x low is below 2**-19 x sqrt(width)
and left out. What is lost moves a rotated coordinate by some 2**-17 x sqrt(width) of its standard deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

MAX_WIDTH = 2048
_ROW_HIGH, _MATRIX_HIGH, _LOW = 2.0**8, 2.0**10, 2.0**16
_SMALLEST_NORMAL = 2.0**-126


class Parts(NamedTuple):
    """A matrix cut for exact products, transposed: `rows @ part`, float32."""

    high: mx.array
    low: mx.array


def cut(matrix: mx.array) -> Parts:
    """A matrix (m, width) of rows of length about 1, ready for `product`."""
    high, low = _cut(matrix.T, _MATRIX_HIGH)
    return Parts(mx.contiguous(high), mx.contiguous(low))


def product(rows: mx.array, parts: Parts) -> mx.array:
    """Rows (..., width) of root mean square 1 (or 0) times the transpose of the matrix that was cut: (..., m)."""
    high, low = _cut(rows, _ROW_HIGH)
    return (high @ parts.high + low @ parts.high) + high @ parts.low


def normalized(x: mx.array) -> tuple[mx.array, mx.array]:
    """Rows in float32 of root mean square 1, and what it was, (..., 1). Zero rows stay zero.

    Neither overflows nor underflows where the elements are normal float32 numbers. A row with a NaN or an infinity has
    a root mean square of NaN.
    """
    x = x.astype(mx.float32)
    peak = mx.max(mx.abs(x), axis=-1, keepdims=True)
    peak = mx.where(peak < _SMALLEST_NORMAL, 1.0, peak)
    scaled = x / peak
    size = mx.sqrt(mean_square(scaled))
    return scaled / mx.where(size == 0, 1.0, size), peak * size


def mean_square(x: mx.array) -> mx.array:
    """Mean of the squares of each row, (..., 1)."""
    return mean_product(x, x)


def mean_product(x: mx.array, y: mx.array) -> mx.array:
    """Mean of the products of each two rows, (..., 1): halves are added element by element until one is left."""
    sums = x * y
    while sums.shape[-1] > 1:
        half = (sums.shape[-1] + 1) // 2
        front, back = sums[..., :half], sums[..., half:]
        if back.shape[-1] < half:
            back = mx.pad(back, [(0, 0)] * (back.ndim - 1) + [(0, 1)])
        sums = front + back
    return sums / x.shape[-1]


def _cut(x: mx.array, grid: float) -> tuple[mx.array, mx.array]:
    high = mx.round(x * grid) / grid
    return high, mx.round((x - high) * _LOW) / _LOW

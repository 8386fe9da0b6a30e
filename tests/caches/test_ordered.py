"""Sums that are the same however many rows are computed together: exact ones against whole numbers."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.ordered import MAX_WIDTH, _cut, cut, mean_square, normalized, product

WIDTHS = [1, 2, 3, 64, 80, 128, 200, 576, MAX_WIDTH]
EXACT = 2**24
"""Whole numbers that a float32 holds without a gap."""


def unit_rows(rows: int, width: int, seed: int) -> mx.array:
    """Rows of length 1 in random directions, as those of a random rotation are."""
    drawn = np.random.default_rng(seed).normal(size=(rows, width))
    return mx.array((drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32))


def hard_rows(matrix: mx.array) -> mx.array:
    """Rows of root mean square 1 that make sums large: rows of the matrix, one number alone, all equal; and random."""
    width = matrix.shape[1]
    alone = np.eye(width, dtype=np.float32)[:4] * math.sqrt(width)
    drawn = np.random.default_rng(5).normal(size=(16, width)).astype(np.float32)
    rows = np.concatenate([np.array(matrix)[:8], alone, np.ones((1, width), np.float32), drawn])
    return normalized(mx.array(rows))[0]


def whole(array: mx.array, grid: float) -> np.ndarray:
    """Numbers on a grid as whole numbers; fails when they are not on it."""
    scaled = np.array(array).astype(np.float64) * grid
    assert np.array_equal(scaled, np.round(scaled))
    return scaled.astype(np.int64)


@pytest.mark.parametrize("width", WIDTHS)
def test_each_product_is_exact(width: int) -> None:
    """The three float32 products equal whole-number arithmetic, and no partial sum in any order can leave 2**24."""
    matrix = unit_rows(40, width, seed=width)
    parts, rows = cut(matrix), hard_rows(matrix)
    high, low = _cut(rows, 2.0**8)
    for (left, left_grid), (right, right_grid) in (
        ((high, 2.0**8), (parts.high, 2.0**10)),
        ((low, 2.0**16), (parts.high, 2.0**10)),
        ((high, 2.0**8), (parts.low, 2.0**16)),
    ):
        ours, theirs = whole(left, left_grid), whole(right, right_grid)
        assert (np.linalg.norm(ours, axis=1).max() * np.linalg.norm(theirs, axis=0).max()) < EXACT
        assert np.array_equal(whole(left @ right, left_grid * right_grid), ours @ theirs)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_product_is_a_matrix_product(width: int) -> None:
    """Against float64, within six standard deviations of `width` roundings: some 2**-17.8 x sqrt(width) each."""
    matrix = unit_rows(40, width, seed=width)
    rows = hard_rows(matrix)
    expected = np.array(rows).astype(np.float64) @ np.array(matrix).astype(np.float64).T
    assert np.abs(np.array(product(rows, cut(matrix))) - expected).max() < 2**-15 * math.sqrt(width) + 1e-6


@pytest.mark.parametrize("width", [1, 3, 64, 80, 200])
def test_rows_alone_and_together_are_bit_equal(width: int) -> None:
    """Sums of squares, root mean squares and products, one row a call and all in one call."""
    rows = mx.array(np.random.default_rng(width).normal(size=(300, width)).astype(np.float32))
    parts = cut(unit_rows(width, width, seed=1))

    def everything(x: mx.array) -> np.ndarray:
        units, size = normalized(x)
        return np.concatenate([np.array(part) for part in (mean_square(x), size, units, product(units, parts))], axis=1)

    alone = np.concatenate([everything(rows[index : index + 1]) for index in range(300)])
    assert np.array_equal(everything(rows), alone)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_mean_square_is_numpys(width: int) -> None:
    """To float32."""
    rows = np.random.default_rng(2).normal(size=(5, width)).astype(np.float32)
    expected = (rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    assert np.array(mean_square(mx.array(rows))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1e-37, 1.0, 3e38])
def test_no_square_overflows_or_vanishes(size: float) -> None:
    """The root mean square of equal numbers is their size, where float32 could not hold the square."""
    units, found = normalized(mx.full((1, 80), size))
    assert found.item() == pytest.approx(size, rel=1e-6)
    assert np.array(units) == pytest.approx(np.ones((1, 80)), rel=1e-6)


def test_zero_rows_stay_zero_and_a_nan_says_so() -> None:
    """A row is judged by itself."""
    units, size = normalized(mx.array([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [3.0, 4.0]]))
    assert np.array_equal(np.array(units[0]), [0.0, 0.0])
    assert np.array_equal(np.isnan(np.array(size[:, 0])), [False, True, True, False])
    assert size[3].item() == pytest.approx(math.sqrt(12.5), rel=1e-6)

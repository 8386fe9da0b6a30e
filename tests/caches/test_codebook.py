"""Lloyd-Max levels against closed forms, the published table for a normal variable, and numpy's own iteration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.caches.codebook import levels, thresholds

MAX_1960 = {
    1: (0.7980,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Positive levels for a normal variable of variance 1: J. Max, Quantizing for minimum distortion, 1960, table I."""


def density(width: int, points: int = 400_001) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates on a grid even in the angle, and their probabilities (cos(a)^(width - 2) da), by numpy."""
    angles = (np.arange(points) + 0.5) / points * math.pi - math.pi / 2
    weights = np.cos(angles) ** (width - 2)
    return np.sin(angles), weights / weights.sum()


def test_one_bit_is_the_mean_magnitude() -> None:
    """E|x| of a coordinate of a unit vector is G(d / 2) / (sqrt(pi) G((d + 1) / 2))."""
    for width in (2, 3, 5, 64, 80, 576, 2048):
        logarithm = math.lgamma(width / 2) - math.lgamma((width + 1) / 2)
        assert levels(1, width)[1] == pytest.approx(math.exp(logarithm) / math.sqrt(math.pi), rel=1e-10)


def test_one_bit_of_a_wide_vector_is_the_papers_constant() -> None:
    """It gives +- sqrt(2 / (pi d)) for one bit."""
    assert levels(1, 2048) == pytest.approx((-math.sqrt(2 / math.pi / 2048), math.sqrt(2 / math.pi / 2048)), rel=2e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_of_a_wide_vector_are_those_of_a_normal_variable(bits: int) -> None:
    """Times sqrt(width) they are Max's table, which has four digits."""
    upper = [level * math.sqrt(2048) for level in levels(bits, 2048)[2 ** (bits - 1) :]]
    assert upper == pytest.approx(MAX_1960[bits], rel=2e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_of_three_dimensions_are_evenly_spaced(bits: int) -> None:
    """A coordinate of a sphere's surface is uniform (Archimedes), so levels are middles of equal cells."""
    count = 2**bits
    assert levels(bits, 3) == pytest.approx([(2 * index + 1) / count - 1 for index in range(count)], abs=1e-9)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_one_dimension_has_two_values(bits: int) -> None:
    """A unit vector of one number is -1 or 1, and is stored exactly."""
    half = 2 ** (bits - 1)
    assert levels(bits, 1) == (-1.0,) * half + (1.0,) * half


@pytest.mark.parametrize(("bits", "width"), [(2, 2), (3, 64), (4, 80)])
def test_numpys_own_iteration_ends_at_the_same_levels(bits: int, width: int) -> None:
    """Lloyd's iteration on a grid, begun elsewhere: cells end midway between levels, levels are means of cells."""
    x, weights = density(width, points=40_001)
    found = np.linspace(-1.5, 1.5, 2**bits) / math.sqrt(width)
    between = np.sin(np.linspace(-math.pi / 2, math.pi / 2, len(x) + 1))
    probability, moment = (np.concatenate([[0], np.cumsum(array)]) for array in (weights, weights * x))
    for _ in range(1500):
        ends = np.concatenate([[-1], (found[1:] + found[:-1]) / 2, [1]])
        found = np.diff(np.interp(ends, between, moment)) / np.diff(np.interp(ends, between, probability))
    assert levels(bits, width) == pytest.approx(found.tolist(), rel=1e-4)


@settings(max_examples=40)
@given(bits=st.integers(1, 8), width=st.integers(2, 2048))
def test_levels_are_sorted_symmetric_and_means_of_their_cells(bits: int, width: int) -> None:
    """The two conditions that define them, with the integral by numpy."""
    found, ends = np.array(levels(bits, width)), np.array(thresholds(bits, width))
    assert np.all(np.diff(found) > 0)
    assert np.array_equal(found, -found[::-1])
    assert ends == pytest.approx((found[1:] + found[:-1]) / 2, abs=1e-15)
    x, weights = density(width)
    inner = slice(1, -1) if bits > 1 else slice(None)  # a grid has too few points in the far tails
    edges = np.searchsorted(x, ends)
    means = np.add.reduceat(weights * x, [0, *edges]) / np.add.reduceat(weights, [0, *edges])
    spacing = np.diff(found).min()
    assert np.abs(means - found)[inner].max() < 0.02 * spacing

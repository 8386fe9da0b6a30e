"""Hadamard rotations: orthonormal, of one magnitude, a row's numbers its own, and refused where there is none."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.hadamard import block, rotate, unrotate
from veloxquant.errors import InvalidParams, MethodRefused

WIDTHS = [1, 2, 16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512, 576, 2048]


def matrix(width: int, seed: int = 0) -> np.ndarray:
    """R of `rotate`, float64: row i is what R makes of the i-th coordinate, transposed."""
    return np.array(rotate(mx.eye(width), seed)).astype(np.float64).T


def sylvester(width: int) -> np.ndarray:
    """Sylvester 1867: each matrix is four of half the width."""
    made = np.array([[1.0]])
    while len(made) < width:
        made = np.block([[made, made], [made, -made]])
    return made


def unsigned(width: int) -> np.ndarray:
    """R without its random signs, times sqrt(block): each column's sign is that of its block's first number."""
    size = block(width)
    rotated = matrix(width) * np.sqrt(size)
    firsts = np.sign(rotated[np.arange(width) // size * size, np.arange(width)])
    return rotated * firsts


@pytest.mark.parametrize("width", WIDTHS)
def test_a_rotation_is_orthonormal(width: int) -> None:
    """R R^T is the identity to float32, and turning back is its transpose."""
    made = matrix(width)
    assert np.abs(made @ made.T - np.eye(width)).max() < 4e-6
    back = np.array(unrotate(mx.eye(width), 0)).astype(np.float64).T
    assert np.abs(back - made.T).max() < 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_a_block_has_one_magnitude(width: int) -> None:
    """1 / sqrt(block) within a block, zero outside: with orthonormal rows that is what a Hadamard matrix is."""
    size = block(width)
    expected = np.kron(np.eye(width // size), np.ones((size, size))) / np.sqrt(size)
    assert np.abs(np.abs(matrix(width)) - expected).max() < 1e-6


@pytest.mark.parametrize("width", [2, 16, 64, 128, 256, 512])
def test_powers_of_two_are_sylvesters_matrix(width: int) -> None:
    """To the sign of each column, which is random."""
    assert np.abs(unsigned(width) - sylvester(width)).max() < 1e-4


@pytest.mark.parametrize(("width", "core"), [(80, 20), (96, 12), (112, 28), (192, 12)])
def test_other_widths_are_a_small_matrix_times_sylvesters(width: int, core: int) -> None:
    """H of 12, 20 or 28 (Paley 1933), entries of 1 and -1 with orthogonal rows, by Kronecker product."""
    made, power = unsigned(width), width // core
    small = np.rint(made[::power, ::power])
    assert np.array_equal(small @ small.T, core * np.eye(core))
    assert np.abs(made - np.kron(small, sylvester(power))).max() < 1e-4


@pytest.mark.parametrize(("width", "size"), [(576, 192), (72, 24), (100, 20), (160, 160), (288, 96), (40, 40)])
def test_a_width_without_a_transform_is_rotated_in_the_largest_blocks(width: int, size: int) -> None:
    """All of one size."""
    assert block(width) == size


@pytest.mark.parametrize("width", [3, 6, 33, 36, 90, 99])
def test_a_width_that_no_block_serves_is_refused_with_the_reason(width: int) -> None:
    """And with a width that would do."""
    with pytest.raises(MethodRefused, match=f"no Hadamard rotation fits the width {width}: no block") as caught:
        block(width)
    assert caught.value.field == "width"
    assert block(int("".join(filter(str.isdigit, caught.value.hint)))) >= 32


@pytest.mark.parametrize("width", [0, -1, 2**13 + 1, 64.0, None])
def test_no_width_is_refused(width: int) -> None:
    """By name."""
    with pytest.raises(InvalidParams) as caught:
        block(width)
    assert caught.value.field == "width"


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 576])
@pytest.mark.parametrize("turn", [rotate, unrotate])
def test_a_row_is_the_same_bits_whatever_the_number_of_rows(width: int, turn: object) -> None:
    """300 rows at once, in pieces of 7, and one by one."""
    rows = mx.array(np.random.default_rng(0).normal(size=(1, 2, 300, width)).astype(np.float32))
    whole = turn(rows, 5)
    for size in (1, 7):
        cut = [turn(rows[:, :, at : at + size], 5) for at in range(0, 300, size)]
        assert mx.array_equal(mx.concatenate(cut, axis=2), whole)


def test_a_loud_channel_is_spread() -> None:
    """A vector of one channel becomes one magnitude in all: 10 / sqrt(64)."""
    spread = rotate(10 * mx.eye(64)[11:12], 3)
    assert np.allclose(np.abs(np.array(spread)), 10 / 8)


def test_signs_follow_the_seed_and_are_even() -> None:
    """Another seed is another rotation; of 4,096 signs half are negative, within four standard errors of 32."""
    signs = np.sign(np.array(rotate(mx.eye(2048), 1))[:, 0])
    more = np.sign(np.array(rotate(mx.eye(2048), 2))[:, 0])
    assert not np.array_equal(signs, more)
    assert abs((signs < 0).sum() + (more < 0).sum() - 2048) < 4 * 32


def test_another_process_makes_the_same_rotation() -> None:
    """What one process packed another can read."""
    program = (
        "import hashlib, mlx.core as mx, numpy as np; mx.random.seed(5);"
        "from veloxquant.caches.hadamard import rotate;"
        "print(hashlib.sha256(np.array(rotate(mx.eye(80), 9)).tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(np.array(rotate(mx.eye(80), 9)).tobytes()).hexdigest()

"""Codes in words: what goes in comes out, and lies where numpy and MLX's own quantizer say it lies."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.caches.packing import lookup, pack, padded, unpack, words


def codes(bits: int, width: int, seed: int) -> np.ndarray:
    """Two rows of three random codes each."""
    return np.random.default_rng(seed).integers(0, 2**bits, (2, 3, width))


def numpy_words(rows: np.ndarray, bits: int) -> np.ndarray:
    """The same layout by numpy: lowest bits first, without gaps, rows filled up with zeros to 32 codes."""
    filled = np.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[-1] % 32)])
    single = ((filled[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(*rows.shape[:2], -1)
    return np.packbits(single, axis=-1, bitorder="little").view("<u4")


@given(bits=st.integers(1, 8), width=st.integers(1, 600), seed=st.integers(0, 99))
def test_packing_is_numpys_and_unpacking_undoes_it(bits: int, width: int, seed: int) -> None:
    """For every number of bits and every width, also those that fill no whole word."""
    rows = codes(bits, width, seed)
    packed = pack(mx.array(rows), bits)
    assert packed.dtype == mx.uint32
    assert np.array_equal(np.array(packed), numpy_words(rows, bits))
    assert np.array_equal(np.array(unpack(packed, bits, width)), rows)


@given(bits=st.integers(1, 8), width=st.integers(1, 600), seed=st.integers(0, 99))
def test_lookup_gives_each_code_its_value(bits: int, width: int, seed: int) -> None:
    """Values in float32, with the padding of the row."""
    rows, values = codes(bits, width, seed), np.random.default_rng(seed).normal(size=2**bits).astype(np.float32)
    found = lookup(pack(mx.array(rows), bits), bits, tuple(values.tolist()))
    assert found.dtype == mx.float32
    assert found.shape[-1] == padded(width)
    assert np.array_equal(np.array(found)[..., :width], values[rows])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_reads_our_words(bits: int) -> None:
    """mx.dequantize with a scale of 1 and a bias of 0 gives the codes."""
    rows = codes(bits, 96, seed=bits)
    ones = mx.ones((2, 3, 3))
    read = mx.dequantize(pack(mx.array(rows), bits), ones, mx.zeros_like(ones), group_size=32, bits=bits)
    assert np.array_equal(np.array(read), rows)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_slice_of_a_buffer_is_read_like_a_copy(bits: int) -> None:
    """Caches hand over the filled part of a longer buffer, whose rows are not next to each other in memory."""
    rows = codes(bits, 70, seed=bits)
    packed = pack(mx.array(rows), bits)[:, 1:]
    values = tuple(float(value) for value in range(2**bits))
    assert np.array_equal(np.array(unpack(packed, bits, 70)), rows[:, 1:])
    assert np.array_equal(np.array(lookup(packed, bits, values))[..., :70], rows[:, 1:])


@pytest.mark.parametrize(("width", "bits", "count"), [(1, 1, 1), (32, 3, 3), (33, 3, 6), (80, 4, 12), (128, 2, 8)])
def test_words_of_a_row_are_bits_times_blocks_of_32(width: int, bits: int, count: int) -> None:
    """That is bits x ceil(width / 32)."""
    assert words(width, bits) == count


def test_the_arithmetic_needs_no_mlx() -> None:
    """The planning half of a method may ask for words in a process that never loads MLX."""
    program = "import sys; from veloxquant.caches.packing import words; print(words(80, 3), 'mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "False"]

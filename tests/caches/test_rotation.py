"""Random matrices: orthogonal, even over all rotations, the same in every process, and in no cache's bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches import rotation as room
from veloxquant.caches.rotation import gaussian, process_bytes, rotation, rotation_parts, sketch_parts


@pytest.mark.parametrize("width", [1, 2, 3, 64, 80, 96, 112, 128, 200, 576])
def test_a_rotation_is_orthogonal(width: int) -> None:
    """R R^T is the identity to float32."""
    matrix = np.array(rotation(width, 7)).astype(np.float64)
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < 3e-6


def test_rotations_favour_no_direction() -> None:
    """Each entry of a Haar matrix has mean 0 and variance 1 / width; a plain QR has a first entry of one sign."""
    width, count = 8, 400
    first = np.array([np.array(rotation(width, seed))[0, 0] for seed in range(count)])
    assert abs(first.mean()) < 4 / np.sqrt(count * width)
    assert first.var() == pytest.approx(1 / width, rel=4 * np.sqrt(2 / count))


def test_another_seed_is_another_rotation() -> None:
    """And another sketch."""
    assert not np.allclose(np.array(rotation(16, 1)), np.array(rotation(16, 2)), atol=0.1)
    assert not np.allclose(np.array(gaussian(16, 16, 1)), np.array(gaussian(16, 16, 2)), atol=0.1)


def test_a_sketch_is_standard_normal_and_independent_of_the_rotation() -> None:
    """Moments of 40,000 numbers within four standard errors; no correlation with the rotation's own numbers."""
    sketch = np.array(gaussian(200, 200, 3)).ravel()
    error = 1 / np.sqrt(sketch.size)
    assert abs(sketch.mean()) < 4 * error
    assert abs((sketch**2).mean() - 1) < 4 * np.sqrt(2) * error
    assert abs((sketch**4).mean() - 3) < 4 * np.sqrt(96) * error
    assert abs(np.corrcoef(sketch, np.array(rotation(200, 3)).ravel())[0, 1]) < 4 * error


def test_another_process_makes_the_same_matrices() -> None:
    """What one process packed another can read; the state of MLX's own generator does not matter."""
    program = (
        "import hashlib, mlx.core as mx, numpy as np; mx.random.seed(5); mx.random.normal((3,));"
        "from veloxquant.caches.rotation import rotation, gaussian;"
        "made = np.array(rotation(80, 9)).tobytes() + np.array(gaussian(50, 80, 9)).tobytes();"
        "print(hashlib.sha256(made).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = np.array(rotation(80, 9)).tobytes() + np.array(gaussian(50, 80, 9)).tobytes()
    assert done.stdout.strip() == hashlib.sha256(ours).hexdigest()


def test_matrices_take_the_documented_bytes() -> None:
    """4 x width^2 for a rotation and twice that for its parts; a sketch likewise with its rows."""
    assert rotation(80, 0).nbytes == 4 * 80**2
    assert sum(part.nbytes for part in rotation_parts(80, 0)) == 2 * 4 * 80**2
    assert gaussian(50, 80, 0).nbytes == 4 * 50 * 80
    assert sum(part.nbytes for part in sketch_parts(50, 80, 0)) == 2 * 4 * 50 * 80


def test_a_matrix_is_made_once() -> None:
    """Every cache of a width shares it."""
    assert rotation(64, 0) is rotation(64, 0)
    assert isinstance(rotation(64, 0), mx.array)


def test_the_bytes_of_all_matrices_are_told() -> None:
    """A new rotation of width 36 adds 4 x 36^2, its parts twice that, a sketch likewise; asked again, none."""
    room._kept._made.clear()  # full of other tests' matrices, it would drop some of them for these
    before, square, rows = process_bytes(), 4 * 36**2, 4 * 5 * 36
    for _ in range(2):
        rotation_parts(36, 987)
        sketch_parts(5, 36, 987)
        assert process_bytes() - before == 3 * (square + rows)

"""Randomized Hadamard rotations of head vectors: every coordinate comes out as a signed mean of all of them.

x -> H (s x), with s a random sign for each coordinate and H an orthonormal matrix of numbers of one magnitude, spreads
what is loud in a few channels over all (QuIP#, arXiv 2402.04396; QuaRot, 2404.00456). It costs width x log2(width)
additions, in an order that is the same for every row whatever the number of rows, so that codes do not depend on how a
prompt is cut.

MLX transforms widths of m x 2**k with m in 1, 12, 20, 28; other sizes it is not to be asked for (its CPU backend
writes past its arrays). A width that is no such size is rotated in blocks of the largest size that divides it: 576 as
three blocks of 192. Signs are constants of the process, 4 x width bytes for each width and seed in use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from veloxquant.caches.kept import Kept
from veloxquant.caches.limits import whole
from veloxquant.errors import MethodRefused

MULTIPLES = (1, 12, 20, 28)
"""m of the sizes that mx.hadamard_transform takes."""
_LARGEST_POWER = 2**13
"""Of two in such a size, in float32."""
LEAST_BLOCK = 16
"""Narrowest block of a width that is rotated in several: narrower ones spread next to nothing."""
WIDEST = 2**13

_kept = Kept(most_bytes=2**20, least=64)


@lru_cache(maxsize=256)
def block(width: int) -> int:
    """Numbers that are rotated together: the width where MLX has such a transform, else the largest block that has one.

    Raises MethodRefused for a width that no block of at least 16 divides.
    """
    whole(width, "width", 1, WIDEST)
    if _is_size(width):
        return width
    fitting = [size for size in range(LEAST_BLOCK, width) if width % size == 0 and _is_size(size)]
    if not fitting:
        raise MethodRefused(
            f"no Hadamard rotation fits the width {width}: no block of at least {LEAST_BLOCK} numbers divides it that "
            "is 1, 12, 20 or 28 times a power of two",
            hint=f"rotate vectors of {-(-width // 32) * 32}, zeros behind, or choose a method without this rotation",
            field="width",
        )
    return fitting[-1]


def rotate(x: Any, seed: int) -> Any:
    """(..., width) -> the same in float32, rotated. A row with a NaN or an infinity has no finite number after it."""
    width = x.shape[-1]
    return _blocked(x.astype(mx.float32) * _signs(width, seed), block(width), _forward)


def unrotate(x: Any, seed: int) -> Any:
    """The inverse of `rotate`, float32."""
    width = x.shape[-1]
    return _blocked(x.astype(mx.float32), block(width), _backward) * _signs(width, seed)


def _is_size(width: int) -> bool:
    """Whether mx.hadamard_transform takes it."""
    odd = width // _power(width)
    return any(odd == multiple // _power(multiple) and width >= multiple for multiple in MULTIPLES) and (
        _power(width) <= _LARGEST_POWER
    )


def _power(number: int) -> int:
    """The greatest power of two that divides it."""
    return number & -number


def _blocked(x: Any, size: int, transform: Any) -> Any:
    if size == x.shape[-1] or not x.size:
        return transform(x) if x.size else x
    return transform(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)


def _forward(x: Any) -> Any:
    return mx.hadamard_transform(x)


def _backward(x: Any) -> Any:
    """H_m (x) H_2^k transposed: a power of two's matrix and that of 12 are symmetric, those of 20 and 28 are not.

    For these each row is a product of its own with the small matrix, so that rows stay independent.
    """
    width = x.shape[-1]
    odd = width // _power(width)
    if odd in (1, 3):
        return mx.hadamard_transform(x)
    multiple = odd * 4
    parts = mx.hadamard_transform(x.reshape(*x.shape[:-1], multiple, width // multiple))
    return (_core(multiple) @ parts).reshape(x.shape)


@_kept
def _core(multiple: int) -> Any:
    """The orthonormal (m, m) matrix of MLX's transform, transposed.

    The transform gives each unit vector its column of H, as a row: as they stand, these rows are the transpose.
    """
    with mx.stream(mx.cpu):
        made = mx.hadamard_transform(mx.eye(multiple, dtype=mx.float32))
        mx.eval(made)
    return made


@_kept
def _signs(width: int, seed: int) -> Any:
    """Independent signs, (width,) float32, made on the CPU: the same on any device."""
    with mx.stream(mx.cpu):
        drawn = mx.random.bernoulli(0.5, (width,), key=mx.random.key(seed))
        signs = mx.where(drawn, 1.0, -1.0).astype(mx.float32)
        mx.eval(signs)
    return signs

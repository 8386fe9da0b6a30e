"""Random matrices that every cache of a width shares: constants of the process, made once from a seed.

No cache holds them, so they are in no cache's bytes. A rotation of width d takes 4 x d^2 bytes, and twice that again in
the parts for exact products, 12 x d^2 together; a sketch of m rows 12 x m x d likewise. At width 128 that is 192 KiB
each. What was not used for long is dropped (`kept`), and made again, the same to the bit, where it is asked for.
Everything is made on the CPU, so that a machine makes the same matrix whatever its default device is. The QR
decomposition is the platform's LAPACK, so that another platform's matrix may differ in the last bits.
"""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import mlx.core as mx

from veloxquant.caches.kept import Kept
from veloxquant.caches.ordered import Parts, cut

_kept = Kept(most_bytes=64 * 2**20, least=12)
"""64 MiB; 12 matrices and pairs of parts are what keys and values of one width each use, outliers and sketch included.
They stay if they are larger, since a cache that needs them would make them again in every call."""
_alive: WeakValueDictionary[int, mx.array] = WeakValueDictionary()
"""Every array that was made here and is still held by anybody, by its id."""


def process_bytes() -> int:
    """Bytes of all matrices that are held now: once a process, whatever the number of layers and caches."""
    return sum(array.nbytes for array in list(_alive.values()))


@_kept
def rotation(width: int, seed: int) -> mx.array:
    """Random orthogonal (width, width) float32, evenly from all of them (Haar).

    The Q of a Gaussian matrix is even once the signs of R's diagonal are taken out of it (Mezzadri 2007,
    arXiv math-ph/0609050, section 5).
    """
    with mx.stream(mx.cpu):
        made = mx.random.normal((width, width), key=_keys(seed)[0])
        q, r = mx.linalg.qr(made)
        matrix = q * mx.where(mx.diagonal(r) < 0, -1.0, 1.0)
        mx.eval(matrix)
    return _counted(matrix)


@_kept
def gaussian(rows: int, width: int, seed: int) -> mx.array:
    """Independent standard normal numbers, (rows, width) float32; independent of the rotation of the same seed."""
    with mx.stream(mx.cpu):
        made = mx.random.normal((rows, width), key=_keys(seed)[1])
        mx.eval(made)
    return _counted(made)


@_kept
def rotation_parts(width: int, seed: int) -> Parts:
    """The rotation, cut for `ordered.product`."""
    return _evaluated(rotation(width, seed))


@_kept
def sketch_parts(rows: int, width: int, seed: int) -> Parts:
    """The Gaussian matrix over sqrt(width), so that rows are about 1 long, cut for `ordered.product`."""
    return _evaluated(gaussian(rows, width, seed) / math.sqrt(width))


def _evaluated(matrix: mx.array) -> Parts:
    with mx.stream(mx.cpu):
        parts = cut(matrix)
        mx.eval(parts)
    for part in parts:
        _counted(part)
    return parts


def _counted(array: mx.array) -> mx.array:
    _alive[id(array)] = array
    return array


def _keys(seed: int) -> mx.array:
    return mx.random.split(mx.random.key(seed))

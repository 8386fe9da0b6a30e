"""When two runs of one model are equal: float noise, and codes that it flips, are told from what a cache does wrong.

A code flips where noise takes a number across a boundary. Of words of 32 bits with codes of b bits, a share f of which
has one code that flipped by a step, the error adds sqrt(12 f b / 32) to that of rounding to the nearest, which is a
step over sqrt(12): with 8 bits, the most, 1.7 sqrt(f) of what the method itself does. It is taken for 2 sqrt(f), since
what is left of a group may be fitted anew, f being that of the array of codes with the largest share.

That is an average over the tokens compared. One flip need not be average: in a token that those compared attend to most
it weighs as much as that token does, and a generation compares one token at a time. A few flips are therefore allowed
the most, wherever they are. A cache that packs other numbers than it should differs in far more words: all that a
token, or a group, has (of one head of width 64, 8 words at 4 bits, for K and for V each). One that attends wrongly to
the right numbers differs in none, and is held to 2 %, or in many, in layers above; behind a flip of noise it could hide
only where there is one in every run, and in nearly all there is none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NOISE = 1e-5
"""Float noise, as a share of the largest logit; if larger, ten times what the engine's own caches show in its place."""
NOISE_TIMES = 10.0
FLIPS = 0.02
"""Share of what the method moves the logits by that may differ though no word held shows a flip: words may be gone."""
FEW_WORDS, FEW_OF_ALL = 4, 0.005
"""At most so many words of a layer, or so large a share of them, are flips. In the first layer that has any: those
above follow from it."""
FLIP_EFFECT, MOST_EFFECT = 2.0, 0.2
"""More than a few flips may have FLIP_EFFECT x sqrt(share), and none more than MOST_EFFECT, which a few may have."""


class Flips(NamedTuple):
    """Words of the first layer in which two runs differ, if they do in any."""

    words: int
    of: int
    worst: float
    """Largest share of one array."""


def rms(array: Any) -> float:
    """Root mean square."""
    return math.sqrt(float((array * array).mean()))


def farthest(one: Any, other: Any) -> float:
    """Largest difference."""
    return float(abs(one - other).max())


def allowed(flips: Flips) -> float:
    """Share of what the method moves the logits by, that two runs may differ by."""
    if flips.words == 0 or flips.words > max(FEW_WORDS, FEW_OF_ALL * flips.of):
        return FLIPS
    if flips.words <= FEW_WORDS:
        return MOST_EFFECT
    return min(MOST_EFFECT, max(FLIPS, FLIP_EFFECT * math.sqrt(flips.worst)))


def flipped(pairs: Iterable[tuple[Any, Any]]) -> Flips:
    """Words that differ between the caches of two runs, given layer by layer."""
    for one, other in pairs:
        ours, theirs = list(_words(one)), list(_words(other))
        counted = [_differing(*both) for both in zip(ours, theirs, strict=True)]
        unlike = sum(differing for differing, _ in counted)
        if unlike:
            worst = max(differing / total for differing, total in counted if total)
            return Flips(unlike, sum(total for _, total in counted), worst)
    return Flips(0, 0, 0.0)


def _words(cache: Any) -> Iterator[Any]:
    """Arrays of whole numbers that grow: codes, and what else a cache keeps of each token."""
    for _, leaf in tree_flatten(cache.state):
        if isinstance(leaf, mx.array) and leaf.ndim > 2 and mx.issubdtype(leaf.dtype, mx.integer):  # noqa: PLR2004
            yield leaf


def _differing(one: Any, other: Any) -> tuple[int, int]:
    """(words that differ, words written), where both have room: how much more there is may depend on the calls."""
    common = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    ours, theirs = one[common], other[common]
    written = (ours != 0) | (theirs != 0)  # slack is zero, and hardly any word
    return int((ours != theirs).sum()), int(written.sum())

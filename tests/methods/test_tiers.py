"""What methods over caches in tiers share, against the cache itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.methods import Variant
from veloxquant.methods.checks import sample_part
from veloxquant.methods.tiers import EIGHT, Kept, parameters


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 0), (99, 0), (100, 0), (131, 0), (132, 32), (163, 32), (164, 64), (1000, 896)]
)
def test_slots_are_whole_groups_of_what_is_neither_first_nor_recent(tokens: int, slots: int) -> None:
    """Groups of 32 after 4 sinks and before 96 recent tokens: 132 tokens are the first to leave one."""
    assert Kept(sinks=4, recent=96, group=32).slots(tokens) == slots


@pytest.mark.parametrize(("recent_bits", "row_bytes"), [(16, 64 * 4), (8, 64 + 2 * 4 * 64 // 32)])
@pytest.mark.parametrize("sinks", [0, 5])
def test_fixed_bytes_are_held_from_the_first_token_on(sinks: int, recent_bits: int, row_bytes: int) -> None:
    """Two heads of width 64 in float32: sinks and 32 + 32 slots of K and of V, nothing packed."""
    kept = Kept(sinks=sinks, recent=32, group=32, recent_bits=recent_bits)
    cache = kept.cache(PerChannelCodec(64, 4, 32), AffineCodec(64, 4, 32), lambda width: AffineCodec(width, EIGHT, 32))
    cache.update_and_fetch(*(mx.ones((1, 2, 1, 64)) for _ in range(2)))
    expected = 2 * 2 * (sinks * 64 * 4 + 64 * row_bytes)
    declared = kept.fixed_bytes(sample_part(64, 4, heads=2), lambda width, itemsize: width * (8 + 16 * itemsize / 32))
    assert declared == expected == cache.nbytes


@pytest.mark.parametrize("given_params", [{}, {"recent": 0, "sinks": 1}, {"group": 128, "recent_bits": 8}])
def test_what_a_variant_does_not_say_is_the_default_of_its_parameters(given_params: dict[str, Any]) -> None:
    """The same for the planning of a variant as for a user who sets parameters."""
    defaults = {one.name: one.default for one in parameters()}
    kept = Kept.of(Variant(method="a", label="b", params=given_params))._asdict()
    assert kept == {"group": 64, **defaults, **given_params}

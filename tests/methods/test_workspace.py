"""The bounds that methods share: sizes are those of the caches, and what is not known costs most."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.caches import affine_codec, attention, tiered_attention, tiered_part
from veloxquant.methods import workspace
from veloxquant.methods.checks import sample_part
from veloxquant.methods.workspace import Tiers, in_blocks, in_tiers, query_heads

TIERS = Tiers(sinks=4, ring=128, group=64, key_space=128, value_space=128, scale_group=64, row_bits=128 * 9.0)

ROUNDED = 1.01
"""Blocks are whole tokens."""


def test_sizes_are_those_of_the_caches() -> None:
    """The planning half cannot import them, and must not drift from them."""
    tiers, plain = tiered_attention, attention
    assert (tiers.TILE_ROWS, tiers.BLOCK_NUMBERS) == (workspace.TILE_ROWS, workspace.BLOCK_NUMBERS)
    assert (plain.TILE_ROWS, plain.BLOCK_NUMBERS) == (workspace.PLAIN_TILE_ROWS, workspace.PLAIN_BLOCK_NUMBERS)
    assert (plain.BLOCK_TOKENS, tiered_part.ENCODE_NUMBERS) == (workspace.BLOCK_TOKENS, workspace.ENCODE_NUMBERS)
    assert workspace.MANY_ROWS == attention.MANY_ROWS == affine_codec.MANY_ROWS


def test_heads_that_are_not_known_are_as_many_as_any_model_has() -> None:
    """128, or the KV heads where those are more."""
    assert query_heads(sample_part(64, 2, heads=8, query_heads=9)) == 9
    assert query_heads(sample_part(64, 2, heads=8)) == 128
    assert query_heads(sample_part(64, 2, heads=160)) == 160


counts = st.integers(1, 2**20)


@given(groups=st.sampled_from([1, 2, 8]), repeats=st.integers(1, 16), queries=st.integers(1, 8192), slots=counts)
def test_known_heads_never_take_more_than_unknown_ones(groups: int, repeats: int, queries: int, slots: int) -> None:
    """So that knowing more never makes a plan worse."""
    known = sample_part(128, 2, groups, groups * repeats)
    unknown = msgspec.structs.replace(known, query_heads=0)
    assert in_tiers(known, TIERS, queries, slots) <= ROUNDED * in_tiers(unknown, TIERS, queries, slots)
    assert in_blocks(known, 128, queries, slots) <= ROUNDED * in_blocks(unknown, 128, queries, slots)


@given(heads=st.sampled_from([8, 9, 32, 64, 71]), queries=st.integers(2, 8192), slots=counts, more=st.integers(0, 4096))
def test_a_bound_never_falls_with_queries_or_slots(heads: int, queries: int, slots: int, more: int) -> None:
    """The last call of a prompt has fewer queries than the others, and larger blocks."""
    part = sample_part(128, 2, 1, heads)
    least = in_tiers(part, TIERS, queries, slots)
    assert least <= ROUNDED * in_tiers(part, TIERS, queries + more, slots)
    assert least <= ROUNDED * in_tiers(part, TIERS, queries, slots + more)
    assert in_blocks(part, 128, queries, slots) <= ROUNDED * in_blocks(part, 128, queries + more, slots + more)


@pytest.mark.parametrize(("heads", "slots"), [(4, 2**17), (32, 2**17)])
def test_a_step_takes_scores_and_scales_of_its_own_heads(heads: int, slots: int) -> None:
    """Five float32 arrays of scores, and two of widened scales for each of two groups; little else at this length."""
    part = sample_part(128, 2, 2, heads)
    told = in_tiers(part, TIERS._replace(row_bits=0), 1, slots)
    assert told == pytest.approx(4 * slots * (5 * heads + 2 * 2 * 4), rel=0.04)

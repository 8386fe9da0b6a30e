"""What a trace asks of methods, by plain values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodNotFound, MethodRefused
from veloxquant.methods import worker
from veloxquant.methods.checks import sample_part

PAIR = {"bits": 4, "group": 64}


@pytest.fixture(scope="module")
def factory() -> Any:
    """As the trace worker gets it."""
    return worker.load()


def test_refusals_builds_and_bytes_agree(factory: Any) -> None:
    """What is declared for an accepted part is what the built cache holds after the same writes."""
    part = sample_part(128, 4, heads=3)
    assert factory.refuses("affine", "affine4-g64", PAIR, part) is None
    cache = factory.build("affine", "affine4-g64", PAIR, 0, part)
    for tokens in (16, 8, 1, 1):
        rows = mx.zeros((1, 3, tokens, 128))
        cache.update_and_fetch(rows, rows)
    declared = factory.declared_bytes("affine", "affine4-g64", PAIR, part, [(16, 1), (8, 1), (1, 2)])
    assert declared == held_bytes(cache) == 256 * 3 * 2 * (64 + 2 * 2 * 4)


def test_a_refused_part_is_not_built(factory: Any) -> None:
    """The same sentence from both."""
    part = sample_part(96, 2)
    assert factory.refuses("affine", "affine4-g64", PAIR, part)[0] == "width_not_divisible"
    with pytest.raises(MethodRefused):
        factory.build("affine", "affine4-g64", PAIR, 0, part)


def test_an_unknown_method_is_not_found(factory: Any) -> None:
    """A stored plan may name what is no longer installed."""
    with pytest.raises(MethodNotFound):
        factory.refuses("nonesuch", "x", {}, sample_part(64, 2))


@pytest.mark.parametrize(("bits", "width", "slot"), [(4.2, 80, 336 // 8 * 2), (5.1, 64, None)])
def test_whole_slots_are_counted_in_whole_bytes(simple: Any, bits: float, width: int, slot: int | None) -> None:
    """4.2 bits have no exact binary form, yet 80 of them are 336 bits; a slot that is no whole number rounds up."""
    method = type("Odd", (simple,), {"key_bits": lambda *_: bits, "value_bits": lambda *_: bits})()
    part = sample_part(width, 2, heads=1)
    declared = worker.declared_bytes(method, method.variants()[0], part, [(1, 2**20 * 256)])
    exact = 2**20 * 256 * 2 * round(bits * 10) * width
    assert declared == -(-exact // 80)
    assert slot is None or declared == 2**20 * 256 * slot


def test_fixed_bytes_are_added_once(simple: Any) -> None:
    """Sinks and codebooks do not grow with length."""
    method = type("Fixed", (simple,), {"fixed_bytes": lambda *_: 1000, "slot_step": lambda *_: 1})()
    part = sample_part(64, 2, heads=1)
    assert worker.declared_bytes(method, method.variants()[0], part, [(1, 10)]) == 10 * 128 + 1000


def test_layers_have_their_own_parameters_where_the_method_gives_them(factory: Any) -> None:
    """As the registry's method answers; one whose layers are alike gives none."""
    parts = {index: sample_part(64, 2) for index in range(6)}
    assert factory.layer_params("affine", "affine4-g64", PAIR, parts, None) == ()
    method = factory.loaded.method("pyramidkv")
    variant = method.variants()[0]
    chosen = factory.layer_params("pyramidkv", variant.label, variant.params, parts, None)
    assert len(chosen) == 6
    budgets = [one["budget"] for one in chosen]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


@pytest.mark.parametrize("name", ["affine", "kivi", "streaming"])
def test_the_first_slot_is_the_first_that_counts(factory: Any, name: str) -> None:
    """One token fewer and there is none; None for a method that leaves the count to the engine's rule."""
    method = factory.loaded.method(name)
    variant, part = method.variants()[0], sample_part(64, 2)
    first = factory.first_slot(name, variant.label, variant.params, part)
    counts = [method.slots(variant, part, tokens) for tokens in (0, 1, 10_000)]
    if first is None:
        assert set(counts) == {None}
    else:
        assert method.slots(variant, part, first - 1) == 0 < method.slots(variant, part, first)

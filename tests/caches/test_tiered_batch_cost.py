"""What a batch of caches in tiers costs: the calls of a step, the groups encoded at once, and every byte."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from cache_kit import WIDTH
from tiered_batch_kit import KINDS, drive, filled, single
from veloxquant_plugins.kivi import Kivi

from veloxquant.caches.held import held_bytes
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.methods import LayerSpec
from veloxquant.methods.checks import sample_part
from veloxquant.methods.worker import declared_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts calls of MLX's functions and of its arrays' methods and operators."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return function(*args, **options)

        return called

    inner = {"__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__hash__", "__dir__", "__repr__"}
    for name, function in list(vars(mx.array).items()):
        if callable(function) and name not in inner:
            monkeypatch.setattr(mx.array, name, counting(f"array.{name}", function))
    for name, function in list(vars(mx).items()):
        if callable(function) and not isinstance(function, type) and not name.startswith("_"):
            monkeypatch.setattr(mx, name, counting(name, function))
    return counted


@pytest.mark.parametrize("length", [120, 99, 3])
def test_a_decode_step_makes_as_many_calls_for_eight_rows_as_for_one(length: int, calls: Counter[str]) -> None:
    """With no group to pack, with one in every row, and with sinks to fill."""
    found = []
    for count in (1, 2, 8):
        twin = filled([length] * count)
        keys, values, queries = (mx.random.normal((count, heads, 1, WIDTH)) for heads in (2, 2, 4))
        calls.clear()
        mask = twin.make_mask(1, return_array=False, window_size=None)
        packed_keys, packed_values = twin.update_and_fetch(keys, values)
        packed_keys.attend(queries, packed_values, 0.2, mask)
        found.append(dict(calls))
    assert found[0] == found[1] == found[2]
    assert 20 < sum(found[0].values()) < 200


def test_rows_pack_at_their_own_time_and_together_when_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 68 + 0, 5 and 5 tokens: a group each 32 steps, encoded at these steps alone, two rows in one call."""
    twin = filled([68, 73, 73])
    encoded: list[tuple[int, ...]] = []
    plain = PerChannelCodec.encode
    monkeypatch.setattr(
        PerChannelCodec, "encode", lambda codec, x, fixed: encoded.append(x.shape) or plain(codec, x, fixed)
    )
    steps = []
    for step in range(1, 65):
        new = mx.random.normal((3, 2, 1, WIDTH))
        before = len(encoded)
        twin.update_and_fetch(new, new)
        steps += [(step, *encoded[at]) for at in range(before, len(encoded))]
    assert steps == [
        (27, 2, 2, 32, WIDTH),  # 73 + 27 = 4 + 32 + 2 x 32
        (32, 1, 2, 32, WIDTH),
        (59, 2, 2, 32, WIDTH),
        (64, 1, 2, 32, WIDTH),
    ]


def test_a_prompt_of_many_groups_is_encoded_for_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 300, 200 and 100 tokens complete 8, 5 and 2 groups: one call."""
    twin = filled([0, 0, 0])
    encoded: list[tuple[int, ...]] = []
    plain = PerChannelCodec.encode
    monkeypatch.setattr(
        PerChannelCodec, "encode", lambda codec, x, fixed: encoded.append(x.shape) or plain(codec, x, fixed)
    )
    twin.prepare(lengths=[300, 200, 100], right_padding=[0, 100, 200])
    new = mx.random.normal((3, 2, 300, WIDTH))
    twin.update_and_fetch(new, new)
    assert encoded == [(8 + 5 + 2, 2, 32, WIDTH)]


@EVERY
def test_bytes_are_rows_times_a_single_cache_of_the_longest(kind: str) -> None:
    """As rows grow, leave and join; a twin without rows or without tokens holds nothing."""
    rows = drive(kind)
    rows.start([0, 0])
    assert rows.twin.nbytes == 0
    rows.start([10, 200])
    assert rows.twin.nbytes == 4 * held_bytes(single(kind, 200))
    rows.filter([0, 2])
    assert rows.twin.nbytes == 2 * held_bytes(single(kind, 10))
    rows.filter([0])
    assert rows.twin.nbytes == 0
    rows.filter([])
    assert rows.twin.nbytes == held_bytes(rows.twin) == 0
    rows.start([150])
    assert rows.twin.nbytes == held_bytes(single(kind, 150))


def test_bytes_are_those_of_the_arithmetic() -> None:
    """kivi, float32, two heads of width 32, 4 sinks, a ring of 64, 4-bit keys and 3-bit values in groups of 32."""
    twin = filled([20, 141])
    packed = (141 - 4 - 32) // 32 * 32
    bits = (4 + 64 / 32) + (3 + 64 / 32)  # a float32 scale and bias for 32 numbers
    assert twin.nbytes == 2 * (2 * WIDTH * (packed * bits / 8 + 2 * 4 * (4 + 64)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bytes_are_what_the_method_plans(dtype: Any) -> None:
    """Every variant of kivi, merged at 1, 3 and 131 tokens and after a step, which completes a group of the longest."""
    part = sample_part(64, dtype.size, heads=2)
    for variant in Kivi().variants():
        singles = [Kivi().build(LayerSpec(index=0, part=part), variant) for _ in range(3)]
        for cache, tokens in zip(singles, (1, 3, 131), strict=True):
            new = mx.zeros((1, 2, tokens, 64), dtype)
            cache.update_and_fetch(new, new)
        twin = TieredKVCache.merge(singles)
        for longest in (131, 132):
            assert twin.nbytes == held_bytes(twin) == 3 * declared_bytes(Kivi(), variant, part, [(longest, 1)])
            new = mx.zeros((3, 2, 1, 64), dtype)
            twin.update_and_fetch(new, new)

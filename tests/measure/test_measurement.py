"""One method, profiled and timed: bytes by arithmetic, the same text twice, a curve that stays small."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import tiny_model
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from tiny_model import FLOAT_SLOT, LAYERS, NUMBERS, PACKED_SLOT

from veloxquant.measure.measurement import MOST_SAMPLES, Run, Subject, _Curve, _look, _settled, run
from veloxquant.profiles.slots import kv_slots, schedule

if TYPE_CHECKING:
    from types import SimpleNamespace

GENERATED, STEP = 20, 128
SLOTS = kv_slots(schedule(300, GENERATED, STEP))
"""Slots of the engine's rule, which 992 recorded buffers follow (tests/profiles)."""


def measured(tiny: SimpleNamespace, label: str, **settings: Any) -> Run:
    """300 + 20 tokens under a variant of the registry."""
    subject = tiny_model.subject(tiny.model, label, prefill_step_size=STEP)
    return run(tiny.model, tiny.tokenizer, tiny.prompt, subject, max_tokens=GENERATED, **settings)


@pytest.mark.parametrize(("label", "slot"), [("fp16", FLOAT_SLOT), ("affine4-g64", PACKED_SLOT)])
def test_resident_bytes_are_slots_times_slot(tiny: SimpleNamespace, label: str, slot: int) -> None:
    """Held, reported and layer by layer: what the arithmetic says."""
    found = measured(tiny, label)
    assert found.resident_bytes == found.reported_bytes == LAYERS * SLOTS * slot
    assert [layer.resident_bytes for layer in found.report.layers] == [SLOTS * slot] * LAYERS
    assert found.peak_bytes >= found.resident_bytes


@pytest.mark.parametrize("label", ["fp16", "affine4-g64"])
def test_sixteen_bit_bytes_are_of_what_was_given(tiny: SimpleNamespace, label: str) -> None:
    """320 tokens x numbers of K and V x two bytes, the same for every method and whatever the model computes in."""
    found = measured(tiny, label)
    assert found.true_fp16_bytes == LAYERS * 320 * NUMBERS * 2
    assert found.resident_ratio == pytest.approx(found.resident_bytes / found.true_fp16_bytes)


def test_both_runs_write_the_same(tiny: SimpleNamespace) -> None:
    """Profiling changes no token, and the lengths are those of the planner: prompt, and what was generated after it."""
    found = measured(tiny, "affine4-g64")
    assert found.same_when_profiled
    assert (found.prompt_tokens, found.generated_tokens, len(found.tokens)) == (300, 20, 20)
    assert (found.label, found.method, found.params["bits"]) == ("affine4-g64", "affine", 4)
    assert found.prefill_tok_s == pytest.approx(300 / found.prefill_s)


def test_caches_that_differ_from_run_to_run_are_told(tiny: SimpleNamespace) -> None:
    """A method whose second list of caches gives other numbers wrote another text when profiled."""
    lists = itertools.count()

    class Forgetful(KVCache):
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            return super().update_and_fetch(keys, -values if self.turned else values)

    def build() -> list[Any]:
        caches = [Forgetful() for _ in range(LAYERS)]
        turned = bool(next(lists))
        for cache in caches:
            cache.turned = turned
        return caches

    subject = Subject(label="forgetful", method="forgetful", build=build)
    assert not run(tiny.model, tiny.tokenizer, tiny.prompt, subject, max_tokens=8).same_when_profiled


def test_a_cache_that_lies_is_told(tiny: SimpleNamespace) -> None:
    """What a cache says of itself stands beside what it holds."""

    class Liar(KVCache):
        @property
        def nbytes(self) -> int:
            return 1

    subject = Subject(
        label="liar", method="liar", build=lambda: [Liar() for _ in range(LAYERS)], prefill_step_size=STEP
    )
    found = run(tiny.model, tiny.tokenizer, tiny.prompt, subject, max_tokens=GENERATED)
    assert (found.reported_bytes, found.resident_bytes) == (LAYERS, LAYERS * SLOTS * FLOAT_SLOT)


def test_the_curve_follows_the_engine(tiny: SimpleNamespace) -> None:
    """299 prompt tokens in chunks of 128, then one token at a time: bytes at each point are slots so far."""
    found = measured(tiny, "fp16")
    assert [sample.tokens for sample in found.timeline] == [0, 128, 256, 299, *range(301, 321)]
    chunks = [(128, 1), (128, 1), (43, 1)]
    held = [LAYERS * kv_slots(chunks[:count]) * FLOAT_SLOT for count in range(1, 4)]
    assert [sample.resident_bytes for sample in found.timeline[1:4]] == held
    assert found.timeline[-1].resident_bytes == found.resident_bytes


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1024, 5000, 20_000])
def test_a_long_curve_is_thinned(count: int) -> None:
    """However long the text is, a few hundred points are kept, in order, the last one among them."""
    curve = _Curve(-1, lambda: 7)
    for done in range(count):
        curve.at(done)
    samples = curve.samples()
    assert min(count, MOST_SAMPLES // 2) <= len(samples) <= MOST_SAMPLES
    assert [sample.tokens for sample in samples] == sorted({sample.tokens for sample in samples})
    assert not count or samples[-1].tokens == count - 1


def test_progress_ends_at_two_whole_runs(tiny: SimpleNamespace) -> None:
    """A bar over 2 x (prompt + text) fills up and never falls."""
    told: list[int] = []
    measured(tiny, "fp16", watch=told.append)
    assert told == sorted(told)
    assert told[-1] == 2 * 320


def test_the_room_opens_without_arrays() -> None:
    """Names can be had, and a command line that prints its help pays for no mlx."""
    code = "import sys, veloxquant.measure as room; [getattr(room, name) for name in room.__all__]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"mlx", "mlx.core", "mlx_lm", "psutil", "matplotlib"} & set(done.stdout.split()) == set()


@pytest.mark.parametrize("label", ["fp16", "affine4-g64", "turboquant-mse4", "turboquant-prod4"])
def test_the_allocator_gave_out_what_the_walk_counts(tiny: SimpleNamespace, label: str) -> None:
    """A second witness: MLX's own counter grew by the bytes of at most 12 arrays, and a freed buffer's page or two."""
    found = measured(tiny, label)
    assert found.allocator_agrees
    slip = 64 * 1024 + 0.02 * found.resident_bytes
    assert -slip <= found.allocated_bytes - found.resident_bytes <= slip + 12 * 3 * 16384


HIDDEN_BYTES = 2**20
hidden: list[mx.array] = []
"""Where no attribute of a cache leads."""


class Hiding(KVCache):
    """Holds a MiB more than can be found by walking."""

    def __init__(self) -> None:
        super().__init__()
        hidden.append(mx.zeros((HIDDEN_BYTES,), dtype=mx.uint8) + 1)
        mx.eval(hidden)


class Doubling(KVCache):
    """Holds its keys by two names, which a walk takes for two arrays."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """As it is, with a view of all keys."""
        result = super().update_and_fetch(keys, values)
        self.view = self.keys.reshape(-1)
        return result


@pytest.mark.parametrize(
    ("cache", "more_bytes"), [(Hiding, HIDDEN_BYTES), (Doubling, -SLOTS * FLOAT_SLOT // 2), (KVCache, 0)]
)
def test_the_allocator_tells_what_a_walk_cannot(tiny: SimpleNamespace, cache: type[KVCache], more_bytes: int) -> None:
    """Hidden arrays are in its count, and views are there once; rounding to pages of 16 KiB aside."""
    subject = Subject("odd", "odd", build=lambda: [cache() for _ in range(LAYERS)], prefill_step_size=STEP)
    found = run(tiny.model, tiny.tokenizer, tiny.prompt, subject, max_tokens=GENERATED)
    hidden.clear()
    differs = found.allocated_bytes - found.resident_bytes
    assert differs == pytest.approx(LAYERS * more_bytes, abs=16 * 16384)
    assert found.allocator_agrees is (more_bytes == 0)


def test_floats_of_keys_and_values_are_told_from_states() -> None:
    """Of caches in 32 bits only, those that keys and values go into, parts of composite caches among them."""

    def filled(cache: Any, dtype: mx.Dtype) -> Any:
        cache.update_and_fetch(mx.ones((1, 1, 4, 8), dtype=dtype), mx.ones((1, 1, 4, 8), dtype=dtype))
        return cache

    states, part = ArraysCache(1), ArraysCache(1)
    states[0] = part[0] = mx.ones((1, 1000))
    composite = CacheList(part, filled(RotatingKVCache(256), mx.float32), filled(KVCache(), mx.float16))
    found = _look([states, composite, filled(KVCache(), mx.float32)], _settled())
    window, whole = composite.caches[1].nbytes, 2 * 256 * 8 * 4
    assert found.float32_kv_bytes == window + whole
    assert found.resident_bytes == found.float32_kv_bytes + 4000 + whole // 2
    assert found.number_types == ("float16", "float32")


def test_the_timed_run_is_as_long_as_the_profiled_one(tiny: SimpleNamespace) -> None:
    """An end-of-text token that only the second list of caches gives does not make it shorter."""
    lists = itertools.count()

    def build() -> list[Any]:
        return [(Turned if next(lists) >= LAYERS else KVCache)() for _ in range(LAYERS)]

    def go(tokenizer: Any) -> Run:
        subject = Subject("forgetful", "forgetful", build=build)
        return run(tiny.model, tokenizer, tiny.prompt, subject, max_tokens=12)

    own = measured(tiny, "fp16").tokens
    end = next(token for token in go(tiny.tokenizer).tokens if token not in own)
    lists = itertools.count()
    tokenizer = copy.copy(tiny.tokenizer)
    tokenizer.eos_token_ids = {end}
    found = go(tokenizer)
    assert (found.generated_tokens, found.report.sequence_tokens) == (12, 312)
    assert found.text_tokens < 12


class Turned(KVCache):
    """Gives values of the other sign."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """Turned."""
        return super().update_and_fetch(keys, -values)

"""What is inside the timed region, by a clock that only moves when something is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from veloxquant.caches.held import arrays
from veloxquant.errors import InvalidParams
from veloxquant.profiling import KVCacheProfiler, MLXCacheProfiler, clock

if TYPE_CHECKING:
    from collections.abc import Iterator

WALK_S, CALL_S, EVAL_S = 100.0, 2.0, 5.0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes by fixed amounts in walks, calls and evaluations; `evaluated` lists what each evaluation got."""
    state = SimpleNamespace(now=0.0, evaluated=[], drained=[])
    evaluate = mx.eval

    def walk(*roots: Any) -> Iterator[Any]:
        state.now += WALK_S
        return arrays(*roots)

    def spy(made: list[mx.array]) -> None:
        state.now += EVAL_S
        state.evaluated.append({array.shape for array in made})
        evaluate(made)

    monkeypatch.setattr(clock, "perf_counter", lambda: state.now)
    monkeypatch.setattr(clock, "arrays", walk)
    monkeypatch.setattr(mx, "eval", spy)
    monkeypatch.setattr(mx, "synchronize", lambda: state.drained.append(len(state.evaluated)))
    return state


class Nested:
    """Returns a handle that holds arrays in a tuple in a mapping, and keeps one that it does not return."""

    state = None

    def __init__(self, scripted: Any) -> None:
        self.scripted, self.kept = scripted, mx.zeros((9,)) + 1

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """Two seconds of work, all lazy."""
        self.scripted.now += CALL_S
        self.kept = mx.ones((8,)) + keys.sum()
        return SimpleNamespace(parts={"k": (keys + 1, [values * 2])}, cache=self)


def test_only_the_call_and_what_it_makes_is_timed(scripted: Any) -> None:
    """Inputs and what the cache held come before; walks do not count; results in any nesting and stores do."""
    cache = Nested(scripted)
    profiled = MLXCacheProfiler(cache)
    handle = profiled.update_and_fetch(mx.zeros((1, 1, 2, 3)) + 1, mx.zeros((1, 1, 2, 4)) + 1)
    assert profiled.profile().quantize_ms_total == (CALL_S + EVAL_S) * 1000
    before, within = scripted.evaluated
    assert before == {(1, 1, 2, 3), (1, 1, 2, 4), (9,)}
    assert within == {(1, 1, 2, 3), (1, 1, 2, 4), (8,)}
    assert handle.cache is cache
    assert scripted.drained == [1]  # after the inputs were computed, before the call: no other work runs meanwhile


def test_appends_and_attention_of_a_standalone_cache_are_timed_alike(scripted: Any) -> None:
    """append_key, append_value and attend each take one call and one evaluation of their own."""

    class Lists:
        def __init__(self) -> None:
            self.keys: list[Any] = []
            self.values: list[Any] = []

        def append_key(self, k: Any) -> None:
            scripted.now += CALL_S
            self.keys.append(k + 1)

        def append_value(self, v: Any) -> None:
            scripted.now += CALL_S
            self.values.append(v + 1)

        def attend(self, q: Any) -> Any:
            scripted.now += 3 * CALL_S
            return mx.softmax(q @ mx.stack(self.keys).T) @ mx.stack(self.values)

        def memory_bytes(self) -> int:
            scripted.now += 1000  # asked outside the timed region
            return 0

    profiled = KVCacheProfiler(Lists())
    profiled.append(mx.ones((4,)), mx.ones((4,)))
    profiled.attend(mx.ones((4,)))
    profile = profiled.profile()
    step = (CALL_S + EVAL_S) * 1000
    assert (profile.quantize_ms_total, profile.write_ms_total) == (step, step)
    assert profile.dequantize_ms_total == (3 * CALL_S + EVAL_S) * 1000


def test_results_are_computed_when_the_call_returns() -> None:
    """The allocator has given out the result's 4 MB by then, though nobody looked at it."""

    class Lazy(KVCache):
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            super().update_and_fetch(keys, values)
            return ({"late": mx.zeros((1000, 1000)) + keys.sum()},)

    profiled = MLXCacheProfiler(Lazy())
    keys = mx.zeros((1, 1, 1, 8))
    profiled.update_and_fetch(keys, keys)
    before = mx.get_active_memory()
    result = profiled.update_and_fetch(keys, keys)
    assert mx.get_active_memory() - before >= 4_000_000
    assert result


class Handle:
    """Something to call for the keys."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def __call__(self) -> Any:
        """The keys."""
        return self.keys


@pytest.mark.parametrize("hand", [Handle, lambda keys: lambda: keys])
@pytest.mark.parametrize("returned", [True, False])
def test_promised_work_in_handles_and_closures_is_computed(hand: Any, returned: bool) -> None:
    """Whether returned or kept by the cache: the 4 MB are given out when the call returns."""

    class Promising(KVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            late = hand(mx.zeros((1000, 1000)) + keys.sum())
            if returned:
                return late, values
            self.late = late
            return super().update_and_fetch(keys, values)

    profiled = MLXCacheProfiler(Promising())
    keys = mx.zeros((1, 1, 1, 8))
    before = mx.get_active_memory()
    result = profiled.update_and_fetch(keys, keys)
    assert mx.get_active_memory() - before >= 4_000_000
    assert result


class Rebinding:
    """Four MB that each step writes into by making a new array of the old: free only where nobody holds the old one."""

    def __init__(self) -> None:
        self.state, self.offset = mx.zeros((1024, 1024)), 0

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """One row more."""
        self.state = mx.slice_update(self.state, keys, mx.array([self.offset]), axes=[0])
        self.offset += 1
        return self.state


def test_a_step_reuses_the_buffer_as_it_does_unprofiled() -> None:
    """The wrapper keeps no array over the call that would force a copy of the buffer beside it."""
    profiled = MLXCacheProfiler(Rebinding())
    step = mx.ones((1, 1024))
    mx.eval(step)
    profiled.update_and_fetch(step, step)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    profiled.update_and_fetch(step, step)
    assert mx.get_peak_memory() < before + 1024 * 1024


def test_a_refused_call_counts_nothing(kv: Any) -> None:
    """The cache's own error comes through, and no figure moves."""
    profiled = MLXCacheProfiler(QuantizedKVCache(64, 4))
    before = profiled.profile()
    with pytest.raises(ValueError, match="quantize"):
        profiled.update_and_fetch(*kv(width=40))
    after = profiled.profile()
    assert (after.n_quantize_calls, after.quantize_ms_total, after.timeline) == (0, 0.0, before.timeline)


def compiles() -> bool:
    """Whether mx.compile traces: on the CPU it needs a C++ compiler, and calls the function as it is without one."""
    try:
        mx.compile(lambda array: (mx.eval(array), array)[1])(mx.ones(1))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_inside_a_transformation_nothing_can_be_timed(transform: Any) -> None:
    """The error says where to call instead."""
    profiled = MLXCacheProfiler(KVCache())
    step = transform(lambda keys: profiled.update_and_fetch(keys, keys)[0])
    if transform is mx.compile and not compiles():
        assert step(mx.ones((1, 1, 4, 8))).shape == (1, 1, 4, 8)
        return
    with pytest.raises(InvalidParams, match="cannot be timed here") as caught:
        step(mx.ones((2, 1, 1, 4, 8)) if transform is mx.vmap else mx.ones((1, 1, 4, 8)))
    assert "outside mx.compile" in caught.value.hint

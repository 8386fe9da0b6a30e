"""A method that fails while it is used: fenced, quarantined, and the caller goes on."""

from __future__ import annotations

import gc
import logging
import math
import signal
import threading
import time
from typing import Any

import pytest

from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec, guard
from veloxquant.methods.checks import sample_part
from veloxquant.methods.guard import Guarded
from veloxquant.methods.timed import NoThread

PART = sample_part(64, 2)


def guarded(simple: Any, **functions: Any) -> tuple[Guarded, Any]:
    """A guarded method with some functions replaced, and its variant."""
    inner = type("Inner", (simple,), functions)()
    variants = inner.variants()
    return Guarded(inner, variants), variants[0]


def test_a_sound_method_passes_through(simple: Any) -> None:
    """Same name, same answers."""
    method, variant = guarded(simple)
    assert (method.name, method.batchable, method.trimmable) == ("simple", False, True)
    assert method.refuses(variant, PART) is None
    assert method.key_bits(variant, PART) == method.value_bits(variant, PART) == 8.0
    assert (method.fixed_bytes(variant, PART), method.slot_step(variant, PART)) == (0, 256)
    assert (method.slots(variant, PART, 300), method.layer_params(variant, [], None)) == (None, None)
    assert method.quality_prior(variant).kl_mean == 0.01
    assert method.quality_at(variant, 10**6) == method.quality_prior(variant)
    assert (method.unpack_cost(variant), method.engine_settings(variant)) == (0.0, None)
    assert method.unpack_bytes(variant) == 0.0
    assert list(method.variants()) == [variant]
    assert method.tripped is None


def test_a_system_that_gives_no_thread_is_not_the_methods_fault(simple: Any) -> None:
    """The call fails, and the next one is answered."""
    method, variant = guarded(simple)
    usual = threading.stack_size(2**46)  # no machine has so much
    try:
        with pytest.raises(NoThread):
            method.key_bits(variant, PART)
    finally:
        threading.stack_size(usual)
    assert method.tripped is None
    assert method.key_bits(variant, PART) == 8.0


def endless(self: Any, variant: Any, part: Any) -> Any:
    """Calls itself for ever."""
    return endless(self, variant, part)


def raising(error: BaseException) -> Any:
    """A function that raises it."""

    def function(self: Any, *args: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    "function",
    [
        raising(ValueError("no")),
        raising(SystemExit(1)),
        raising(MemoryError()),
        raising(RecursionError()),
        endless,
        lambda *_: bytearray(2**62),
        lambda *_: math.nan,
        lambda *_: -4.0,
    ],
)
def test_r28_a_failing_call_is_refused_and_quarantines_the_method(simple: Any, function: Any) -> None:
    """From there on `refuses` answers for it, and no other call reaches it."""
    method, variant = guarded(simple, key_bits=function)
    gc.disable()  # or what other tests left could be collected, and fail, at the very bottom of the recursion
    try:
        with pytest.raises(MethodRefused, match=r"method simple: key_bits\(\) failed"):
            method.key_bits(variant, PART)
    finally:
        gc.enable()
    code, why = method.refuses(variant, PART) or ("", "")
    assert (code, why) == ("quarantined", method.tripped)
    with pytest.raises(MethodRefused):
        method.value_bits(variant, PART)


def test_what_a_failing_call_says_holds_no_secret_of_the_environment(
    simple: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that plans without a daemon keeps its environment, and its plugins could tell of it."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    method, variant = guarded(simple, key_bits=raising(ValueError("no \x1b[2Jhf_canary")))
    with pytest.raises(MethodRefused) as error:
        method.key_bits(variant, PART)
    assert error.value.message.endswith("ValueError: no \N{REPLACEMENT CHARACTER}[2J(HF_TOKEN)")


def test_a_raising_refuses_is_an_answer(simple: Any) -> None:
    """The planner asks `refuses` first, and it never raises."""
    method, variant = guarded(simple, refuses=raising(OSError("disk")))
    assert method.refuses(variant, PART) == ("quarantined", "method simple: refuses() failed: OSError: disk")


def test_an_interrupt_is_the_users(simple: Any, request: pytest.FixtureRequest) -> None:
    """Control-C during a call stops the program and blames nobody; a method that raises one itself is to blame."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(self: Any, *_: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        return 8.0

    method, variant = guarded(simple, key_bits=interrupted)
    with pytest.raises(KeyboardInterrupt):
        method.key_bits(variant, PART)
    assert method.tripped is None
    method, variant = guarded(simple, key_bits=raising(KeyboardInterrupt()))
    with pytest.raises(MethodRefused, match="it raised KeyboardInterrupt"):
        method.key_bits(variant, PART)


@pytest.mark.parametrize("hang", [lambda *_: time.sleep(20), lambda *_: spin()])
def test_r28_a_call_that_hangs_is_left_and_quarantines_the_method(
    simple: Any, monkeypatch: pytest.MonkeyPatch, hang: Any
) -> None:
    """A method that hangs on one real layer, asleep or in a loop, holds up one plan for the limit and no other."""
    monkeypatch.setattr(guard, "LIMIT_S", 0.2)
    method, variant = guarded(simple, value_bits=hang)
    with pytest.raises(MethodRefused, match=r"value_bits\(\) failed: it took longer than 0.2 s"):
        method.value_bits(variant, PART)
    assert method.refuses(variant, PART) == ("quarantined", method.tripped)


def test_a_loop_that_was_left_ends(monkeypatch: pytest.MonkeyPatch, simple: Any) -> None:
    """It would take processor time from the daemon for ever."""
    monkeypatch.setattr(guard, "LIMIT_S", 0.2)
    before = set(threading.enumerate())
    method, variant = guarded(simple, value_bits=lambda *_: spin())
    with pytest.raises(MethodRefused):
        method.value_bits(variant, PART)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def spin() -> float:
    """For ever."""
    while True:
        pass


def test_equal_questions_are_asked_once(simple: Any) -> None:
    """Planning functions are pure, so that a plan costs a look-up for what an earlier plan asked."""
    asked = []
    method, variant = guarded(simple, key_bits=lambda *question: asked.append(question) or 8.0)
    assert [method.key_bits(variant, part) for part in (PART, sample_part(64, 2), sample_part(80, 2))] == [8.0] * 3
    assert len(asked) == 2


def test_r28_a_slow_method_is_warned_of_and_the_third_time_quarantined(
    simple: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over 5 ms a warning, once; over 50 ms three times and it is out."""
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 0.06)
    method, variant = guarded(simple)
    with caplog.at_level(logging.WARNING):
        answers = [method.key_bits(variant, sample_part(width, 2)) for width in (64, 80, 96)]
    assert answers == [8.0] * 3
    assert len(caplog.records) == 1
    assert method.tripped == "method simple: key_bits() took more than 50 ms 3 times"


def test_a_method_of_ours_is_checked_without_a_clock(simple: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in the caller's own thread and may take its time, but a mistake costs it its place all the same."""
    monkeypatch.setattr(guard, "TOO_SLOW_S", 0.0)
    monkeypatch.setattr(guard, "SLOW_S", 0.0)
    threads: list[str] = []
    inner = type("Inner", (simple,), {"key_bits": lambda *_: threads.append(threading.current_thread().name) or 8.0})()
    variants = inner.variants()
    method = Guarded(inner, variants, trusted=True)
    assert [method.key_bits(variants[0], sample_part(width, 2)) for width in (64, 80, 96, 112)] == [8.0] * 4
    assert set(threads) == {threading.current_thread().name}
    assert method.tripped is None
    wrong = type("Inner", (simple,), {"key_bits": lambda *_: math.nan})()
    method = Guarded(wrong, variants, trusted=True)
    with pytest.raises(MethodRefused, match="nan"):
        method.key_bits(variants[0], PART)
    assert method.refuses(variants[0], PART) == ("quarantined", method.tripped)


def test_a_failing_build_is_refused_without_quarantine(simple: Any) -> None:
    """A layer that cannot be built says nothing about others."""
    method, variant = guarded(simple, build=raising(ZeroDivisionError("x")))
    with pytest.raises(MethodRefused, match="simple8 cannot be built for layer 3: ZeroDivisionError: x"):
        method.build(LayerSpec(index=3, part=PART), variant)
    assert method.tripped is None


def test_a_standalone_cache_lacks_nothing_or_is_refused(simple: Any) -> None:
    """What a method returns is used as it is; a method that builds none says so, as does one that raises."""

    class Cache:
        append_key = append_value = append = attend = memory_bytes = __len__ = lambda *_: 0

    cache = Cache()
    method, variant = guarded(simple, build_standalone=lambda *_: cache)
    assert method.build_standalone(64, variant) is cache
    refusals = {
        "simple builds no standalone cache": {},
        "which has no append, memory_bytes": {"build_standalone": lambda *_: _Half()},
        "at width 64: ValueError: odd": {"build_standalone": raising(ValueError("odd"))},
    }
    for message, functions in refusals.items():
        method, variant = guarded(simple, **functions)
        with pytest.raises(MethodRefused, match=f"simple8 cannot be built standalone.*{message}"):
            method.build_standalone(64, variant)
        assert method.tripped is None


class _Half:
    append_key = append_value = attend = __len__ = lambda *_: 0

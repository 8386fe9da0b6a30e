"""mlx-lm's attention serves packed K and V, and goes on as before for all else."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from cache_kit import WIDTH, normal
from mlx_lm.models import base

from veloxquant.caches import attention
from veloxquant.caches.attention import Packed, install, uninstall
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

SCALE = WIDTH**-0.5


@pytest.fixture(autouse=True)
def hooked() -> Iterator[None]:
    """Each test starts with the hook in place and leaves it there, as a process with packed caches has it."""
    install()
    yield
    install()


def arrays() -> tuple[Any, Any, Any]:
    """Three queries of four heads over 64 keys and values of two, for two sequences."""
    return normal(1, 2, 4, 3, WIDTH), normal(2, 2, 2, 64, WIDTH), normal(3, 2, 2, 64, WIDTH)


def packed(x: Any) -> Packed:
    """Keys or values as they are."""
    return Packed(FloatCodec(x.shape[-1]), [x], (), x.shape[2])


def furthest(a: Any, b: Any) -> float:
    """The greatest difference."""
    return float(mx.abs(a - b).max())


def test_the_engine_calls_the_handle_and_its_own_function_for_all_else() -> None:
    """mlx-lm's dispatcher over packed keys and over its own quantized triples."""
    q, k, v = arrays()
    cache = type("Cache", (), {"bits": 8, "group_size": 32})
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal")
    served = base.scaled_dot_product_attention(q, packed(k), packed(v), cache=cache, scale=SCALE, mask="causal")
    assert furthest(served, expected) < 1e-5
    triples = [mx.quantize(x, group_size=32, bits=8) for x in (k, v)]
    own = base.scaled_dot_product_attention(mx.array(q), *triples, cache=cache, scale=SCALE, mask="causal")
    assert furthest(own, expected) < 0.05


def test_whatever_the_engines_function_takes_is_taken() -> None:
    """By position or by name, its last two parameters too; what it is not ours to serve goes on as it came."""
    served = base.quantized_scaled_dot_product_attention
    assert inspect.signature(served) == inspect.signature(served.original)
    q, k, v = arrays()
    cache = type("Cache", (), {"bits": 8, "group_size": 32})
    expected = base.scaled_dot_product_attention(q, packed(k), packed(v), cache=cache, scale=SCALE, mask="causal")
    named = {"scale": SCALE, "mask": "causal", "group_size": 32, "bits": 8}
    for args, options in (((q, packed(k), packed(v), SCALE, "causal", 32, 8), {}), ((q, packed(k), packed(v)), named)):
        assert mx.array_equal(served(*args, **options), expected)
    assert mx.array_equal(served(queries=q, q_keys=packed(k), q_values=packed(v), **named), expected)
    triples = [mx.quantize(x, group_size=32, bits=8) for x in (k, v)]
    own = served(mx.array(q), *triples, SCALE, "causal", 32, 8)
    assert mx.array_equal(served(queries=mx.array(q), q_keys=triples[0], q_values=triples[1], **named), own)


def test_what_a_later_engine_asks_for_besides_is_refused_by_name() -> None:
    """Sinks would change the result: a TypeError where they are given, none where they are None."""
    q, k, v = arrays()
    served = base.quantized_scaled_dot_product_attention
    served(q, packed(k), packed(v), scale=SCALE, mask=None, sinks=None)
    with pytest.raises(TypeError, match="has no sinks"):
        served(q, packed(k), packed(v), scale=SCALE, mask=None, sinks=mx.zeros((4,)))


def test_behind_another_programs_function_ours_is_found() -> None:
    """One that was put around ours since: it stays, ours is reached through it, and installing adds nothing."""
    served = base.quantized_scaled_dot_product_attention

    def theirs(*args: Any, **options: Any) -> Any:
        return served(*args, **options)

    base.quantized_scaled_dot_product_attention = theirs
    try:
        assert not uninstall()
        install()
        assert base.quantized_scaled_dot_product_attention is theirs
    finally:
        base.quantized_scaled_dot_product_attention = served


def test_installing_twice_is_installing_once() -> None:
    """And uninstalling puts the very function back that was there."""
    assert uninstall()
    own = base.quantized_scaled_dot_product_attention
    assert not uninstall()
    install()
    served = base.quantized_scaled_dot_product_attention
    install()
    assert base.quantized_scaled_dot_product_attention is served
    assert uninstall()
    assert base.quantized_scaled_dot_product_attention is own


def test_an_engine_that_calls_otherwise_is_refused_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that no longer looks the function up fails the self-test."""
    uninstall()
    own = base.quantized_scaled_dot_product_attention
    with monkeypatch.context() as other:
        other.setattr(base, "scaled_dot_product_attention", lambda *_, **__: None)
        with pytest.raises(EngineUnavailable, match="the handle saw None"):
            install()
    assert base.quantized_scaled_dot_product_attention is own


def test_an_engine_without_the_function_or_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm before 0.32 cannot save what a packed cache's state holds."""
    uninstall()
    with monkeypatch.context() as old:
        old.setattr("mlx_lm.__version__", "0.31.9")
        with pytest.raises(EngineUnavailable, match=r"older than 0\.32"):
            install()
    with monkeypatch.context() as lacking:
        lacking.delattr(base, attention.NAME)
        with pytest.raises(EngineUnavailable, match="has no such function"):
            install()


def test_a_model_that_reads_packed_keys_itself_is_told_so() -> None:
    """AttributeError naming what was read, which a trace turns into the reason of a refusal."""
    keys = packed(mx.zeros((1, 2, 5, WIDTH)))
    with pytest.raises(AttributeError, match="packed K and V have no 'shape'"):
        _ = keys.shape
    with pytest.raises(TypeError):
        mx.swapaxes(keys, -1, -2)
    assert not hasattr(keys, "dtype")

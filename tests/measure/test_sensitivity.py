"""The estimate of what quantized K and V cost, against closed forms and against a model that really runs so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache

from veloxquant.caches import registration
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.tiered_layout import Layout
from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.measure import sensitivity
from veloxquant.measure.conformance import models
from veloxquant.measure.sensitivity import codecs, look, sensitivities

TOKENS, VOCABULARY = 260, 11
IDS = [int(one) for one in np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)]


class Linear:
    """A softmax over stored values times a matrix: its Fisher information is known. One head of width 32."""

    def __init__(self, *, caches: Any = None) -> None:
        mx.random.seed(7)
        self.values = mx.random.normal((1, 1, TOKENS, 32))
        self.matrix = 0.3 * mx.random.normal((32, VOCABULARY))
        self.layers = [None]
        self.caches = caches

    def make_cache(self) -> list[Any]:
        """The engine asks for it."""
        return [KVCache()] if self.caches is None else self.caches()

    def __call__(self, ids: Any, cache: Any) -> Any:
        """Logits (1, tokens, vocabulary)."""
        _, values = cache[0].update_and_fetch(mx.zeros_like(self.values), self.values)
        return values[:, 0] @ self.matrix


class Tiny:
    """A llama of two layers with two KV heads of width 32."""

    def __init__(self) -> None:
        mx.random.seed(11)
        config = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
        }
        self.model = llama.Model(llama.ModelArgs.from_dict(config))
        # Random weights of the usual size attend to all alike: sharper scores and louder answers, as trained ones.
        for layer in self.model.layers:
            layer.self_attn.q_proj.weight = 4 * layer.self_attn.q_proj.weight
            layer.self_attn.k_proj.weight = 4 * layer.self_attn.k_proj.weight
            layer.self_attn.o_proj.weight = 4 * layer.self_attn.o_proj.weight
        self.model.lm_head.weight = 4 * self.model.lm_head.weight


class Bending(KVCache):  # type: ignore[misc]
    """The engine's cache with one head of one side replaced by what a codec reads back, after the sinks."""

    def __init__(self, codec: Any, side: int, head: int, sinks: int = 4) -> None:
        super().__init__()
        self.codec, self.side, self.head, self.sinks = codec, side, head, sinks

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """All tokens come in one call."""
        pair = [keys, values]
        whole = (keys.shape[2] - self.sinks) // self.codec.tokens * self.codec.tokens
        held = pair[self.side][:, self.head : self.head + 1, self.sinks : self.sinks + whole]
        fixed = self.codec.start(held[:, :, :1])
        bent = mx.array(pair[self.side])
        bent[:, self.head : self.head + 1, self.sinks : self.sinks + whole] = self.codec.decode(
            self.codec.encode(held, fixed), fixed, mx.float32
        )
        pair[self.side] = bent
        return super().update_and_fetch(*pair)


def log_probabilities(logits: Any) -> Any:
    """In float64."""
    x = np.array(logits.astype(mx.float32), dtype=np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def divergence(before: Any, after: Any) -> float:
    """Mean KL in nats a token."""
    first, second = log_probabilities(before), log_probabilities(after)
    return float((np.exp(first) * (first - second)).sum(-1).mean())


def test_the_estimate_is_the_quadratic_form_of_the_fisher_matrix() -> None:
    """For logits v W: KL = 1/2 e' W (diag p - p p') W' e, token by token, written out in numpy; values of 4 bits."""
    toy = Linear()
    (layer,) = sensitivities(toy, IDS, (4,), codecs, draws=200)
    codec = codecs(32, 4)[1]
    held = toy.values[:, :, 4:]
    error = np.array(codec.decode(codec.encode(held, ()), (), mx.float32) - held, dtype=np.float64)[0, 0]
    pushed = error @ np.array(toy.matrix, dtype=np.float64)
    p = np.exp(log_probabilities(toy(None, [KVCache()])))[0, 4:]
    exact = 0.5 * ((p * pushed**2).sum(-1) - (p * pushed).sum(-1) ** 2).mean()
    assert layer.value[0][0] == pytest.approx(exact, rel=0.05)
    assert layer.key == ((0.0,),)
    real = divergence(toy(None, [KVCache()]), toy(None, [Bending(codec, 1, 0)])) * TOKENS / (TOKENS - 4)
    assert layer.value[0][0] == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_one_head_in_few_bits_costs_about_what_was_estimated(side: int) -> None:
    """A llama run with one head's keys or values packed, each head of each layer by itself: within a factor of two."""
    model = Tiny().model
    tokens = [int(one) for one in np.random.default_rng(3).integers(0, VOCABULARY, 260)]
    bits = (4, 6)
    found = sensitivities(model, tokens, bits, codecs, draws=8, recent=None)
    plain = model(mx.array(tokens)[None], cache=[KVCache(), KVCache()])
    ratios = []
    for layer in found:
        for head in range(2):
            for at, width in enumerate(bits):
                caches: list[Any] = [KVCache(), KVCache()]
                caches[layer.index] = Bending(codecs(32, width)[side], side, head)
                real = divergence(plain, model(mx.array(tokens)[None], cache=caches))
                ratios.append((layer.key, layer.value)[side][head][at] / real)
    assert len(ratios) == 8
    assert all(0.5 < ratio < 2 for ratio in ratios), ratios


@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_what_is_read_of_recent_tokens_does_not_count(side: int) -> None:
    """A llama whose first layer really keeps one side in tiers: within a factor of two, all heads together."""
    model = Tiny().model
    tokens = [int(one) for one in np.random.default_rng(1).integers(0, VOCABULARY, 400)]
    layer = sensitivities(model, tokens, (2, 4), codecs, draws=4)[0]
    plain = model(mx.array(tokens)[None], cache=[KVCache(), KVCache()])
    for at, width in enumerate((2, 4)):
        kept: list[Any] = [FloatCodec(32), FloatCodec(32)]
        kept[side] = codecs(32, width)[side]
        tiers = TieredKVCache(*kept, sinks=sensitivity.SINKS, recent=sensitivity.RECENT)
        real = divergence(plain, model(mx.array(tokens)[None], cache=[tiers, KVCache()]))
        estimate = sum(head[at] for head in (layer.key, layer.value)[side])
        assert 0.5 < estimate / real < 2, (width, estimate, real)


def test_reads_in_two_parts_are_attention() -> None:
    """With nothing added the model answers as with the engine's own caches, window masks included."""
    for name in ("llama", "qwen3_next"):
        model, ids = models.model(name), mx.array(models.text()[:260])[None]
        stored: dict[int, Any] = {}
        plain = model(ids, cache=sensitivity._noting_all(model, stored))
        registration.register()
        layout = Layout.checked(sensitivity.SINKS, sensitivity.RECENT, sensitivity.GROUP, None)
        read = model(ids, cache=sensitivity._adding(model, stored, {}, layout))
        assert mx.abs(plain - read).max().item() < 1e-4 * mx.abs(plain).max().item()


def test_more_bits_cost_less_and_classes_add_up() -> None:
    """The first class has the channels that cost most; all classes together are all heads together."""
    (first, second) = sensitivities(Tiny().model, IDS, (2, 3, 4, 8), codecs)
    for layer in (first, second):
        for row in layer.tables:
            assert list(row) == sorted(row, reverse=True)
        assert np.allclose(np.sum(layer.key_classes, axis=0), np.sum(layer.key, axis=0), rtol=1e-5)
        assert [row[1] for row in layer.key_classes] == sorted((row[1] for row in layer.key_classes), reverse=True)
        assert len(layer.key_classes) == 4
        assert [sorted(order) for order in layer.key_order] == [list(range(32))] * 2


def test_what_is_kept_as_it_is_costs_nothing() -> None:
    """Floats for both, and the tokens of the sinks."""
    (layer,) = sensitivities(Linear(), IDS, (8,), lambda width, _: (FloatCodec(width), FloatCodec(width)))
    assert layer.value == ((0.0,),)


def test_the_same_text_gives_the_same_figures() -> None:
    """Labels are drawn with fixed keys."""
    assert sensitivities(Linear(), IDS, (3,), codecs) == sensitivities(Linear(), IDS, (3,), codecs)


def test_layers_that_keep_no_plain_cache_are_left_out() -> None:
    """A window beside a plain cache that nothing is written to: neither is there, and with no other it is refused."""
    toy = Linear(caches=lambda: [KVCache(), RotatingKVCache(max_size=8), KVCache()])
    assert [seen.index for seen in look(toy, IDS)] == [0]
    windows = Linear(caches=lambda: [RotatingKVCache(max_size=200)])
    with pytest.raises(MethodRefused, match="no layer of this model keeps a plain growing cache"):
        look(windows, IDS)


def test_a_model_that_cannot_be_differentiated_is_refused() -> None:
    """With the engine's own reason."""

    class Rough(Linear):
        def __call__(self, ids: Any, cache: Any) -> Any:
            return mx.fast.metal_kernel is None or _broken(super().__call__(ids, cache))

    with pytest.raises(MethodRefused, match="cannot be differentiated"):
        look(Rough(), IDS)


def _broken(logits: Any) -> Any:
    """A function whose gradient raises."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def rough(x: Any) -> Any:
        return x * 1.0

    @rough.vjp  # type: ignore[untyped-decorator]
    def gone(*_: Any) -> Any:
        raise ValueError("no gradient is known")

    return rough(logits)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_gives_no_numbers_is_refused(value: float) -> None:
    """Rather than that a calibration of NaN is stored."""
    toy = Linear()
    toy.matrix = toy.matrix * value
    with pytest.raises(MethodRefused, match="no finite"):
        look(toy, IDS)


def test_a_text_that_is_too_short_is_refused() -> None:
    """With the least that is taken."""
    with pytest.raises(InvalidParams, match=f"at least {sensitivity.LEAST_TOKENS}"):
        sensitivities(Linear(), IDS[:100], (4,), codecs)


def test_draws_are_at_least_one() -> None:
    """Without one there is no gradient."""
    with pytest.raises(InvalidParams, match="draws"):
        sensitivities(Linear(), IDS, (4,), codecs, draws=0)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3_text", "qwen3_next", "phi3"])
def test_real_architectures_are_measured_where_they_grow_plainly(name: str) -> None:
    """Experts, windows, recurrent layers: each plain cache of the trace, with its heads and widths, and no other."""
    growing = {layer.index: part for layer in models.profile(name).layers if (part := layer.packable) is not None}
    found = sensitivities(models.model(name), models.text()[:260], (2, 4), codecs, draws=1)
    assert [layer.index for layer in found] == sorted(growing)
    for layer in found:
        part = growing[layer.index]
        assert (len(layer.key), len(layer.value)) == (part.heads, part.heads)
        assert {len(order) for order in layer.key_order} == {part.key_width}
        assert all(0 <= row[1] <= row[0] < 1 for row in layer.tables)
        assert sum(row[0] for row in layer.tables) > 0

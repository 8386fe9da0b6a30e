"""Packed caches in the engine's real model classes: the logits of its own caches, or a refusal with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.packed import PackedKVCache
from veloxquant.methods import worker
from veloxquant.models.exchange import ProbeRequest
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.models.trace_worker.probes import Prober
from veloxquant.profiles.slots import kv_slots

if TYPE_CHECKING:
    from veloxquant.profiles import CachePart

_ARCHS = json.loads((Path(__file__).parents[1] / "data" / "mlx_lm_archs.json").read_text())["archs"]

PACKED = {
    "cohere": 2,
    "exaone4": 1,  # windows interleaved
    "gemma3n": 1,  # layers that share K and V
    "laguna": 1,
    "llama4": 1,  # chunks interleaved
    "minicpm3": 4,  # K and V of unlike widths
    "nanbeige": 8,  # two caches a layer
    "olmoe": 4,  # experts
    "plamo3": 2,
    "qwen3_5_moe": 1,  # recurrent layers between
    "qwen3_next": 1,
    "telechat3": 4,
}
"""Unlike architectures, and how many layers take a packed cache."""

REFUSED = {
    "baichuan_m1": ("composite", "no layer is a plain growing cache"),
    "deepseek_v3": ("latent", "packed K and V have no 'swapaxes'"),
    "gemma2": ("engine_error", "packed K and V have no 'swapaxes'"),  # attention by hand
    "gemma4_text": ("donor", "incompatible function arguments"),
    "gpt_oss": ("sinks", "does not support attention sinks"),
    "phixtral": ("engine_error", "packed K and V have no 'dtype'"),
    "stablelm": ("engine_error", "packed K and V have no 'astype'"),
}
"""Architectures that can pack no layer: one of the reasons in the trace, and what its sentence says."""

VARIANTS = (
    ("turboquant_mse", "turboquant-mse3", {"bits": 3}),
    ("turboquant_prod", "turboquant_prod-bits.2", {"bits": 2}),
)


class Unpacked:
    """Packed caches whose codecs change nothing, so that logits can be compared."""

    def refuses(self, *_: Any) -> None:
        """Nothing."""

    def build(self, method: str, label: str, params: Any, index: int, part: CachePart) -> PackedKVCache:
        """Floats in the packed cache."""
        return PackedKVCache(FloatCodec(part.key_width), FloatCodec(part.value_width))

    def declared_bytes(self, method: str, label: str, params: Any, part: CachePart, runs: Any) -> int:
        """The engine's own slots."""
        return kv_slots(runs) * part.slot_bytes


@pytest.mark.parametrize("name", PACKED)
def test_logits_are_those_of_the_engines_own_caches(name: str) -> None:
    """Five calls of one token and of several, to 1e-4 of the largest logit."""
    run = _ARCHS[name]["runs"][0]
    profile, model = tracing.trace(run["config"], "float32"), engine.build(run["config"], "float32")
    probe = Prober(model, profile, Unpacked()).probe(ProbeRequest(method="floats", label="floats"))
    assert len(probe.packed) == PACKED[name]
    mx.eval(model.parameters())
    own, packed = engine.fresh_caches(model), engine.fresh_caches(model)
    for index in probe.packed:
        part = profile.layers[index].packable
        assert part is not None
        packed[index] = Unpacked().build("", "", {}, index, part)
    for tokens in (9, 1, 1, 4, 1):
        given = mx.arange(tokens)[None] + 3
        expected = model(given, cache=own)
        worst = mx.abs(expected - model(given, cache=packed)).max() / mx.abs(expected).max()
        assert float(worst) < 1e-4


@pytest.fixture(scope="module")
def factory() -> worker.Factory:
    """The installed methods, as the trace worker gets them."""
    return worker.load()


@pytest.mark.parametrize("name", [*PACKED, *REFUSED])
@pytest.mark.parametrize(("method", "label", "params"), VARIANTS)
def test_the_trace_packs_or_gives_the_reason(
    name: str, method: str, label: str, params: dict[str, Any], factory: worker.Factory
) -> None:
    """As many layers as floats are packed in, each holding the declared bytes (which the trace checks), or a reason."""
    run = _ARCHS[name]["runs"][0]
    profile, model = tracing.trace(run["config"], run["dtype"]), engine.build(run["config"], run["dtype"])
    probe = Prober(model, profile, factory).probe(ProbeRequest(method=method, label=label, params=params))
    assert len(probe.packed) == PACKED.get(name, 0)
    if name in PACKED:
        assert probe.refused is None
        return
    reason, text = REFUSED[name]
    assert text in str(probe.refused)
    assert reason in {kept.reason for kept in probe.kept}

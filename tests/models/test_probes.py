"""A method's caches in place of the engine's: which layers take them, which keep the engine's own, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from probe_kit import CONFIGS, DEEPSEEK, GEMMA4

from veloxquant.models.exchange import ProbeRequest
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.models.trace_worker.factory import load_factory
from veloxquant.models.trace_worker.probes import Prober

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.profiles import Probe

pytestmark = pytest.mark.usefixtures("factories")


def probe(config: Mapping[str, Any], *, bits: int = 8, group: int = 32, factory: str = "quantized") -> Probe:
    """One variant of mlx-lm's own quantized cache on a config, in float16."""
    made = load_factory(f"engine_factory:{factory}")
    prober = Prober(engine.build(config, "float16"), tracing.trace(config, "float16"), made)
    return prober.probe(ProbeRequest(method="q", label="q", params={"bits": bits, "group": group}))


def reasons(found: Probe) -> dict[int, str]:
    """Why each kept layer is kept."""
    return {kept.index: kept.reason for kept in found.kept}


def test_every_layer_of_a_plain_model_is_packed(tiny: dict[str, Any]) -> None:
    """A llama takes the quantized cache on all four layers and keeps none."""
    assert probe(tiny).packed == (0, 1, 2, 3)
    assert probe(tiny).kept == ()


def test_only_the_donor_of_a_model_that_shares_keys_is_kept() -> None:
    """gemma-4: full layers 1 and 3 are packed, full layer 5 is read by the layers that share it and is not."""
    found = probe(GEMMA4)
    assert found.packed == (1, 3)
    assert reasons(found) == {0: "window", 2: "window", 4: "window", 5: "donor"}


def test_without_sharing_every_full_layer_is_packed() -> None:
    """The same model with no shared layers has no donor."""
    found = probe({**GEMMA4, "num_kv_shared_layers": 0})
    assert found.packed == (1, 3, 5, 7, 9)


def test_attention_sinks_refuse_every_full_layer() -> None:
    """gpt-oss passes sinks to attention, which mlx-lm's quantized attention refuses."""
    found = probe(CONFIGS["gpt_oss"])
    assert found.packed == ()
    assert "sinks" in str(found.refused)
    assert set(reasons(found).values()) == {"sinks", "window"}


def test_latents_keep_the_engines_cache() -> None:
    """DeepSeek-V3 reads latents outside the attention call; the engine's own error is the answer."""
    found = probe({**CONFIGS["deepseek_v3"], **DEEPSEEK})
    assert found.packed == ()
    assert set(reasons(found).values()) == {"latent"}
    assert "swapaxes" in str(found.refused)


def test_attention_written_by_hand_refuses_every_layer() -> None:
    """gemma-2 soft-caps its scores itself, on raw arrays."""
    found = probe(CONFIGS["gemma2"])
    assert found.packed == ()
    assert set(reasons(found).values()) == {"engine_error"}


def test_layers_with_an_attention_of_their_own_are_kept_one_by_one() -> None:
    """phi-3-small alternates block-sparse attention on raw arrays with plain attention."""
    found = probe(CONFIGS["phi3small"])
    assert found.packed == (1, 3)
    assert reasons(found) == {0: "engine_error", 2: "engine_error"}


@pytest.mark.parametrize(
    ("name", "packed", "kept"),
    [
        ("falcon_h1", 0, {"composite"}),
        ("qwen3_next", 1, {"state"}),
        ("llama4", 1, {"window"}),
        ("deepseek_v32", 0, {"latent"}),
        ("mamba", 0, {"state"}),
        ("gemma3_text", 2, {"window"}),
    ],
)
def test_layers_that_are_no_plain_growing_cache_keep_the_engines(name: str, packed: int, kept: set[str]) -> None:
    """Windows, states, latents and mixtures stay what they are, each with its word."""
    found = probe(CONFIGS[name])
    assert len(found.packed) == packed
    assert set(reasons(found).values()) == kept


def test_a_group_that_does_not_divide_the_width_is_the_methods_own_refusal(tiny: dict[str, Any]) -> None:
    """Head width 32 and groups of 64: no call of the model is needed to know."""
    found = probe(tiny, group=64)
    assert set(reasons(found).values()) == {"width"}
    assert found.refused == "groups of 64 do not divide 32"


def test_bytes_must_be_the_declared_ones_to_the_byte(tiny: dict[str, Any]) -> None:
    """A method that declares one byte too few is refused, and the two figures are in the text."""
    found = probe(tiny, factory="careless")
    held = 2 * 256 * 64 * (8 + 1) // 8  # heads x slots x both widths x (8 bits + 2 x 16 / 32)
    assert found.packed == ()
    assert found.refused == f"the cache of layer 0 holds {held} bytes and its method declares {held - 1}"


def test_a_probe_leaves_the_model_as_it_was(tiny: dict[str, Any]) -> None:
    """A probe that fails in the middle changes nothing for the next one."""
    config = CONFIGS["gpt_oss"]
    prober = Prober(
        engine.build(config, "float16"), tracing.trace(config, "float16"), load_factory("engine_factory:quantized")
    )
    wanted = ProbeRequest(method="q", label="q", params={"bits": 8, "group": 32})
    assert prober.probe(wanted) == prober.probe(wanted)


def test_a_method_that_cannot_be_loaded_refuses_its_probes_and_nothing_else(tiny: dict[str, Any]) -> None:
    """The trace goes on; the reason is in each probe."""
    found = probe(tiny, factory="absent")
    assert found.refused is not None
    assert "methods cannot be loaded" in found.refused
    assert [kept.index for kept in found.kept] == [0, 1, 2, 3]


def test_a_builder_that_wants_to_exit_keeps_the_engines_caches(tiny: dict[str, Any]) -> None:
    """SystemExit from a plugin is an answer like any other."""
    prober = Prober(
        engine.build(tiny, "float16"), tracing.trace(tiny, "float16"), load_factory("engine_factory:deadly")
    )
    found = prober.probe(ProbeRequest(method="q", label="raise", params={"bits": 8, "group": 32}))
    assert found.packed == ()
    assert found.refused == "SystemExit: a plugin wants out"


def test_many_layers_failing_alike_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three failures in the same words and the last layer alone stand for 24 layers: at most 5 calls of the model."""
    config = {**CONFIGS["gemma2"], "num_hidden_layers": 24}
    profile, model = tracing.trace(config, "float16"), engine.build(config, "float16")
    calls = []
    monkeypatch.setattr(
        "veloxquant.models.trace_worker.probes.call", lambda *args: (calls.append(1), engine.call(*args))
    )
    found = Prober(model, profile, load_factory("engine_factory:quantized")).probe(
        ProbeRequest(method="q", label="q", params={"bits": 8, "group": 32})
    )
    assert len(found.kept) == 24
    assert len(calls) <= 5


def test_nothing_is_evaluated(llama_8b: dict[str, Any]) -> None:
    """16 GB of weights and their caches are traced and probed within 64 MiB of MLX memory."""
    held_by_others = mx.get_active_memory()
    mx.reset_peak_memory()
    assert len(probe(llama_8b).packed) == 32
    assert mx.get_peak_memory() - held_by_others < 64 * 2**20


def test_a_cache_with_slots_is_probed_like_any_other(tiny: dict[str, Any]) -> None:
    """Following the calls must not need an attribute of its own on the method's cache."""
    prober = Prober(
        engine.build(tiny, "float16"), tracing.trace(tiny, "float16"), load_factory("engine_factory:slotted")
    )
    found = prober.probe(ProbeRequest(method="q", label="q", params={"bits": 8, "group": 32}))
    assert found.packed == (0, 1, 2, 3)

"""The fallback without the engine: for every family in its table it says exactly what the engine says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from veloxquant.errors import ModelConfigInvalid, ModelNotSupported
from veloxquant.models import static
from veloxquant.models.resolve import resolve
from veloxquant.models.trace_worker import engine, tracing

_DATA = Path(__file__).parent.parent / "data"
PUBLISHED = {
    entry["model"]: entry["config"] for entry in json.loads((_DATA / "model_configs.json").read_text())["models"]
}
RECORDED = {
    f"{name}-{at}": run["config"]
    for name, arch in json.loads((_DATA / "mlx_lm_archs.json").read_text())["archs"].items()
    for at, run in enumerate(arch["runs"])
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: config for name, config in {**PUBLISHED, **RECORDED}.items() if config.get("model_type") in static.families()
}
STAND_INS: dict[str, dict[str, Any]] = json.loads((_DATA / "model_stand_ins.json").read_text())
"""For partial configs: what the engine needs and the cache does not depend on."""

UNSURE = {
    "gpt_oss-0": "4 entries for 2 layers",  # the engine follows layer_types and ignores the count
    "CohereLabs/tiny-aya-global": "no num_hidden_layers",  # the engine falls back on the count of another model
}
"""Configs the engine takes by a default that a reader of fields should not guess."""

COMPLETED = {
    "Qwen/Qwen2.5-1.5B-Instruct": {"model_type": "qwen2"},
    "CohereLabs/tiny-aya-global": {"num_hidden_layers": 32},
}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - UNSURE.keys()))
def test_the_table_says_what_the_engine_says(name: str) -> None:
    """Layer for layer the same classes, heads, widths, windows and state bytes, at the engine's number formats."""
    config = {**CONFIGS[name], "torch_dtype": "bfloat16"}
    found = static.read(resolve(config=config))
    traced = tracing.trace({**config, **STAND_INS.get(name, {})}, "bfloat16")
    assert found.layers == traced.layers
    assert (found.num_layers, found.query_heads, found.head_width, found.hidden_size, found.fused_attention) == (
        traced.num_layers,
        traced.query_heads,
        traced.head_width,
        traced.hidden_size,
        traced.fused_attention,
    )


@pytest.mark.parametrize("name", sorted(UNSURE))
def test_where_fields_contradict_each_other_it_refuses(name: str) -> None:
    """The message says which."""
    with pytest.raises(ModelConfigInvalid, match=UNSURE[name]):
        static.read(resolve(config=CONFIGS[name]))


def test_every_family_of_the_table_is_compared() -> None:
    """A row that no config checks would be a guess. Three share their module, two are completed below."""
    compared = {config["model_type"] for name, config in CONFIGS.items() if name not in UNSURE}
    remapped = {"mistral": "llama", "kimi_k2": "deepseek_v3", "minimax_m2": "minimax"}
    assert {remapped.get(name, name) for name in static.families()} <= compared | {"qwen2", "cohere2"}


@pytest.mark.parametrize("name", sorted(COMPLETED))
def test_configs_with_their_missing_field_are_compared_too(name: str) -> None:
    """The file leaves out what these families need to be told."""
    config = {**PUBLISHED[name], **COMPLETED[name], "torch_dtype": "bfloat16"}
    assert static.read(resolve(config=config)).layers == tracing.trace(config, "bfloat16").layers


def test_it_says_what_it_is() -> None:
    """Source, lower confidence, a note, no parameter counts and no probes."""
    found = static.read(resolve(config=PUBLISHED["meta-llama/Meta-Llama-3.1-8B"], config_model_id="llama"))
    assert (found.source, found.model_id, found.architecture) == ("static", "llama", "llama")
    assert found.confidence < 1
    assert "not from the engine" in found.notes[0]
    assert found.num_parameters is None
    assert found.probes == ()


@pytest.mark.parametrize("model_type", ["gemma4", "kimi_k3", "no_such_model", "LLAMA", 5, None, ["llama"], "x" * 5000])
def test_what_the_table_does_not_name_is_refused_by_name(model_type: Any) -> None:
    """Whatever other fields the config has, the usual formula is not used on it."""
    config = {**PUBLISHED["meta-llama/Meta-Llama-3.1-8B"], "model_type": model_type}
    with pytest.raises(ModelNotSupported, match=str(model_type)[:20].strip("[]'").replace("[", "")) as error:
        static.read(resolve(config=config))
    assert error.value.field == "model.config"


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    """phi-4 has no head_dim, so its width depends on all three."""
    config = {name: value for name, value in PUBLISHED["microsoft/phi-4"].items() if name != field}
    with pytest.raises(ModelConfigInvalid, match=field):
        static.read(resolve(config=config))


@pytest.mark.parametrize("layers", [0, -1, 5000, 10**30, "32", True, None])
def test_absurd_layer_counts_are_invalid(layers: Any) -> None:
    """No layer list is made for a count no model has."""
    config = {**PUBLISHED["microsoft/phi-4"], "num_hidden_layers": layers}
    with pytest.raises(ModelConfigInvalid):
        static.read(resolve(config=config))


@pytest.mark.parametrize(
    ("field", "count"),
    [("num_key_value_heads", 0), ("num_key_value_heads", 2**40), ("head_dim", 0), ("head_dim", 2**40)],
)
def test_absurd_heads_and_widths_are_invalid(field: str, count: int) -> None:
    """No cache takes nothing, and none takes more than there is."""
    config = {**PUBLISHED["microsoft/phi-4"], field: count}
    with pytest.raises(ModelConfigInvalid, match=f"of {count}, which is not between"):
        static.read(resolve(config=config))


def test_layer_types_must_match_the_layers() -> None:
    """A list that is too short would leave layers out silently."""
    config = {**PUBLISHED["allenai/Olmo-3-7B-Instruct"], "layer_types": ["full_attention"]}
    with pytest.raises(ModelConfigInvalid, match="1 entries for 32 layers"):
        static.read(resolve(config=config))


def test_the_engine_refuses_what_the_table_does_not_know_either() -> None:
    """The name in the refusal is the config's own."""
    with pytest.raises(engine.EngineRefused, match="no_such_model"):
        tracing.trace({"model_type": "no_such_model"}, "bfloat16")

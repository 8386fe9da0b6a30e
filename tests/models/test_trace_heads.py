"""Query heads of each cache: what the engine's own attention was called with, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.models import fields
from veloxquant.models.trace_worker import tracing

if TYPE_CHECKING:
    from veloxquant.profiles import CachePart

_DATA = Path(__file__).parent.parent / "data"
RECORDED: dict[str, dict[str, Any]] = {
    name: arch["runs"][0]["config"]
    for name, arch in json.loads((_DATA / "mlx_lm_archs.json").read_text())["archs"].items()
    if arch["runs"]
}


def parts(name: str) -> list[CachePart]:
    """All that hold K and V, in layer order."""
    layers = tracing.trace(RECORDED[name], "float16").layers
    return [part for layer in layers for part in layer.parts if part.kind != "state"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "deepseek_v3", "falcon_h1", "gpt_oss", "gemma4"])
def test_layers_that_are_alike_have_the_heads_of_the_config(name: str) -> None:
    """Growing and sliding, latent ones over one KV head, and those whose K and V later layers share."""
    expected = fields.whole(RECORDED[name], fields.QUERY_HEADS)
    assert {part.query_heads for part in parts(name)} == {expected}


def test_layers_that_differ_have_their_own() -> None:
    """OpenELM's config lists the heads of each layer; Step-3.5's sliding layers have as many as it says for them."""
    assert [part.query_heads for part in parts("openelm")] == RECORDED["openelm"]["num_query_heads"]
    config = RECORDED["step3p5"]
    sliding = config["attention_other_setting"]["num_attention_heads"]
    assert sliding != config["num_attention_heads"]
    for part, kind in zip(parts("step3p5"), config["layer_types"], strict=True):
        assert part.query_heads == (sliding if kind == "sliding_attention" else config["num_attention_heads"])


@pytest.mark.parametrize("name", ["gemma2", "phi3small"])
def test_attention_that_a_model_computes_itself_is_not_known(name: str) -> None:
    """All of gemma-2's layers, which soft-cap their scores, and the block-sparse ones of Phi-3-small."""
    config, found = RECORDED[name], [part.query_heads for part in parts(name)]
    every = config.get("dense_attention_every_n_layers", len(found) + 1)
    dense = [(index + 1) % every == 0 for index in range(len(found))]
    assert found == [config["num_attention_heads"] if own else 0 for own in dense]

"""mlx-lm finds our cache classes by name in its own module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as engine

import veloxquant
from veloxquant.caches import attention
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.registration import register
from veloxquant.errors import EngineUnavailable

METHODS = Path(__file__).parents[2] / "docs" / "methods.md"


def test_registering_makes_the_class_known_and_attention_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """From either: a call, or the first cache that is built."""
    for act in (register, lambda: PackedKVCache(FloatCodec(8), FloatCodec(8))):
        attention.uninstall()
        monkeypatch.delattr(engine, "PackedKVCache", raising=False)
        act()
        assert engine.PackedKVCache is PackedKVCache
        assert type(base.quantized_scaled_dot_product_attention).__module__ == "veloxquant.caches.attention"


def test_the_public_name_is_the_same_function() -> None:
    """What a process calls before it loads a saved prompt with mlx-lm alone."""
    assert veloxquant.register_caches is register


def test_the_documented_way_to_load_a_saved_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no cache was built, mlx-lm raises KeyError; after the lines of docs/methods.md it has the cache."""
    cache = PackedKVCache(FloatCodec(8), FloatCodec(8))
    cache.update_and_fetch(mx.ones((1, 1, 3, 8)), mx.ones((1, 1, 3, 8)))
    engine.save_prompt_cache(str(tmp_path / "prompt.safetensors"), [cache])
    attention.uninstall()
    monkeypatch.delattr(engine, "PackedKVCache")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError, match="PackedKVCache"):
        engine.load_prompt_cache("prompt.safetensors")
    blocks = re.findall(r"```py\n(.*?)```", METHODS.read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "load_prompt_cache(" in block]
    space: dict[str, Any] = {}
    exec(lines, space)  # noqa: S102 -- our own documentation
    assert [loaded.offset for loaded in space["prompt_cache"]] == [3]


def test_a_class_of_the_engines_own_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later mlx-lm with a class of that name is left alone, and saved caches would be read wrongly: refused."""
    foreign = type("PackedKVCache", (), {})
    monkeypatch.setattr(engine, "PackedKVCache", foreign, raising=False)
    with pytest.raises(EngineUnavailable, match="PackedKVCache of its own"):
        register()
    assert engine.PackedKVCache is foreign

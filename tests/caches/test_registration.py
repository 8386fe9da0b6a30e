"""mlx-lm finds our cache classes by name in its own module."""

from __future__ import annotations

import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as engine

import veloxquant
from veloxquant.caches import attention
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.registration import register
from veloxquant.errors import EngineUnavailable


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


def test_a_class_of_the_engines_own_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later mlx-lm with a class of that name is left alone, and saved caches would be read wrongly: refused."""
    foreign = type("PackedKVCache", (), {})
    monkeypatch.setattr(engine, "PackedKVCache", foreign, raising=False)
    with pytest.raises(EngineUnavailable, match="PackedKVCache of its own"):
        register()
    assert engine.PackedKVCache is foreign

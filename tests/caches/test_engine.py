"""Building the engine's own quantized cache, and refusing where it would break."""

from __future__ import annotations

import sys

import pytest
from mlx_lm.models.cache import QuantizedKVCache

from veloxquant.caches.engine import cache_module, quantized_kv_cache
from veloxquant.errors import EngineUnavailable, MethodRefused


def test_the_engines_own_class_is_built() -> None:
    """Not a subclass: mlx-lm looks saved classes up by name in its own module."""
    cache = quantized_kv_cache(bits=4, group_size=64, key_width=128, value_width=64)
    assert type(cache) is QuantizedKVCache
    assert (cache.bits, cache.group_size, cache.offset) == (4, 64, 0)


@pytest.mark.parametrize(("key_width", "value_width"), [(96, 64), (64, 96), (64, 0), (0, 64)])
def test_a_width_the_group_does_not_divide_is_refused(key_width: int, value_width: int) -> None:
    """K and V widths are checked apart, and a width of zero has no group at all."""
    with pytest.raises(MethodRefused, match="not a multiple of the group size 64"):
        quantized_kv_cache(bits=4, group_size=64, key_width=key_width, value_width=value_width)


def test_bits_that_a_fresh_cache_has_no_room_for_are_refused() -> None:
    """Five bits of 128 numbers take 20 words, and mlx-lm makes room for 128 // (32 // 5) = 21."""
    with pytest.raises(MethodRefused, match="cannot start at 5 bits for key width 128"):
        quantized_kv_cache(bits=5, group_size=64, key_width=128, value_width=128)


def test_without_mlx_lm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error with the command, not an ImportError."""
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    with pytest.raises(EngineUnavailable) as caught:
        cache_module()
    assert caught.value.hint == "pip install mlx-lm"

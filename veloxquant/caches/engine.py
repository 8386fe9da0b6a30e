"""The engine's own cache classes, imported when first asked for: what methods and `apply` build from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.errors import EngineUnavailable, MethodRefused

if TYPE_CHECKING:
    from types import ModuleType

_WORD_BITS = 32


def cache_module() -> ModuleType:
    """mlx_lm.models.cache. Raises EngineUnavailable when mlx-lm cannot be imported."""
    try:
        from mlx_lm.models import cache
    except ImportError as error:
        raise EngineUnavailable(f"mlx-lm cannot be imported: {error}", hint="pip install mlx-lm") from error
    return cache  # type: ignore[no-any-return]


def packed_width(width: int, bits: int) -> int:
    """32-bit words that mx.quantize makes of one row of `width` numbers (MLX packs bits without gaps between words)."""
    return width * bits // _WORD_BITS


def fresh_buffer_width(width: int, bits: int) -> int:
    """Words that a fresh QuantizedKVCache of mlx-lm 0.32 makes room for: width // (32 // bits).

    Differs from `packed_width` where bits does not divide 32, and then the first write fails.
    """
    return width // (_WORD_BITS // bits)


def quantized_kv_cache(*, bits: int, group_size: int, key_width: int, value_width: int) -> Any:
    """A fresh mlx_lm QuantizedKVCache for heads of these widths: packed from the first token on.

    Raises MethodRefused where the engine's class would fail on its first write, EngineUnavailable without mlx-lm.
    """
    for what, width in (("key", key_width), ("value", value_width)):
        if width <= 0 or width % group_size:
            raise MethodRefused(f"{what} width {width} is not a multiple of the group size {group_size}")
        if fresh_buffer_width(width, bits) != packed_width(width, bits):
            raise MethodRefused(f"mlx-lm's quantized cache cannot start at {bits} bits for {what} width {width}")
    return cache_module().QuantizedKVCache(group_size=group_size, bits=bits)

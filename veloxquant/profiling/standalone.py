"""KVCacheProfiler: a cache that stores and attends by itself, timed and weighed step by step."""

from __future__ import annotations

from typing import Any

from veloxquant.errors import InvalidParams, quoted
from veloxquant.profiling.clock import timed
from veloxquant.profiling.forwarding import Forwarding, put, where_wrapped, where_wrapped_has
from veloxquant.profiling.measures import fp16_bytes
from veloxquant.profiling.report import LayerProfile
from veloxquant.profiling.tally import Tally

_HALF = 2  # bytes of a 16-bit number
_CLAIMS = ("memory_bytes", "nbytes")


def _pairwise(cache: Any) -> bool:
    return hasattr(cache, "append_key") and hasattr(cache, "append_value")


def _appends(cache: Any) -> object:
    """What `append` of the wrapper uses; AttributeError, by the name of the cache's class, where there is nothing."""
    return _pairwise(cache) or cache.append


class KVCacheProfiler(Forwarding):
    """Wraps a cache with append_key, append_value, attend, memory_bytes and perhaps len().

    cache: what to profile. head_dim: key width of the documented 16-bit baseline (2 x head_dim bytes an append_key);
    cache._d where it is not given and there, else 0, and then compression_ratio is 0.0. layer_id: label in reports.
    Raises InvalidParams for a cache without append_key or attend and for a head_dim that is no whole number from 0 up.

    Everything but the functions below, read, set or deleted, reaches the cache. The functions are there where the cache
    has what they need; arguments beyond the documented ones go to the cache as they are.
    """

    __slots__ = ("_profiled_head_dim",)
    _profiled_head_dim: int

    def __init__(self, cache: Any, head_dim: int | None = None, layer_id: Any = 0) -> None:
        if isinstance(cache, type) or not (hasattr(cache, "append_key") or hasattr(cache, "attend")):
            raise InvalidParams(
                f"cache is {quoted(cache)}, which has neither append_key nor attend",
                hint="wrap a cache of mlx-lm in MLXCacheProfiler; KVCacheProfiler is for standalone caches",
                field="cache",
            )
        put(self, cache, cache, Tally(cache, LayerProfile(layer_id), _CLAIMS))
        object.__setattr__(self, "_profiled_head_dim", _head_dim(cache, head_dim))

    @where_wrapped_has
    def append_key(self, k: Any, *args: Any, **kwargs: Any) -> None:
        """The cache's own, timed as quantize. Counts one token and 2 x head_dim bytes, whatever the shape of k."""
        ms = self._profiled_timed("append_key", k, *args, **kwargs)
        self._profiled_keyed(ms)
        self._profiled_stored((k,), ms, calls=1)

    @where_wrapped_has
    def append_value(self, v: Any, *args: Any, **kwargs: Any) -> None:
        """The cache's own, timed as write."""
        ms = self._profiled_timed("append_value", v, *args, **kwargs)
        self._profiled_tally.profile.write_ms_total += ms
        self._profiled_stored((v,), ms, calls=0)

    @where_wrapped(_appends)
    def append(self, k: Any, v: Any, *args: Any, **kwargs: Any) -> None:
        """append_key(k), then append_value(v), each timed for itself; neither where the cache's check_pair refuses.

        A cache that has no check_pair keeps the key of a value that it refuses. Further arguments, and caches without
        append_key or append_value, take the cache's own append: one call and one token, all of its time as quantize.
        is_fused stays False there, as attend is timed for itself.
        """
        cache = self._profiled_cache
        if args or kwargs or not _pairwise(cache):
            ms = self._profiled_timed("append", k, v, *args, **kwargs)
            self._profiled_keyed(ms)
            self._profiled_stored((k, v), ms, calls=1)
            return
        if hasattr(cache, "check_pair"):
            cache.check_pair(k, v)
        self.append_key(k)
        self.append_value(v)

    @where_wrapped_has
    def attend(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        """The cache's own, timed as dequantize until its result is computed. Returns it unchanged."""
        result, ms = timed(self._profiled_cache, self._profiled_cache.attend, q, *args, **kwargs)
        profile = self._profiled_tally.profile
        profile.n_dequantize_calls += 1
        profile.dequantize_ms_total += ms
        self._profiled_tally.after_call(self._profiled_cache)
        return result

    def profile(self) -> LayerProfile:
        """What was counted so far, and what the cache holds now. A copy: it does not change later."""
        self._profiled_tally.look(self._profiled_cache)
        return self._profiled_tally.snapshot()

    def reset(self) -> None:
        """Count from zero. The cache and what it stores stay as they are."""
        self._profiled_tally.reset(self._profiled_cache)

    def _profiled_timed(self, name: str, *given: Any, **named: Any) -> float:
        _, ms = timed(self._profiled_cache, getattr(self._profiled_cache, name), *given, **named)
        return ms

    def _profiled_keyed(self, ms: float) -> None:
        profile = self._profiled_tally.profile
        profile.n_quantize_calls += 1
        profile.tokens_written += 1
        profile.quantize_ms_total += ms
        profile.fp16_baseline_bytes += _HALF * self._profiled_head_dim

    def _profiled_stored(self, given: tuple[Any, ...], ms: float, calls: int) -> None:
        tally = self._profiled_tally
        tally.profile.true_fp16_bytes += fp16_bytes(*given)
        tally.update(tally.after_call(self._profiled_cache), ms, calls)

    def _profiled_again(self, cache: Any) -> Any:
        other = super()._profiled_again(cache)
        object.__setattr__(other, "_profiled_head_dim", self._profiled_head_dim)
        return other


def _head_dim(cache: Any, given: int | None) -> int:
    """What was given, else the cache's `_d`, else 0."""
    if given is None:
        own = getattr(cache, "_d", 0)
        return own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidParams(
            f"head_dim is {quoted(given)}, which is no width",
            hint="give the width of one key in numbers, for example 64",
            field="head_dim",
        )
    return given

"""MLXCacheProfiler: any cache of mlx-lm, or like one, timed and weighed while a model uses it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from veloxquant.errors import InvalidParams, quoted
from veloxquant.profiling.clock import timed
from veloxquant.profiling.forwarding import Forwarding, put, unwrapped, where_wrapped_has
from veloxquant.profiling.measures import fp16_bytes, tokens_and_width
from veloxquant.profiling.report import LayerProfile
from veloxquant.profiling.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

_HALF = 2  # bytes of a 16-bit number
_CLAIMS = ("nbytes", "memory_bytes")


class MLXCacheProfiler(Forwarding):
    """Wraps one entry of a prompt cache; the list of wrappers goes wherever the list of caches went.

    Own names are update_and_fetch, profile, reset, batch_profile, and merge, extend, extract, to_quantized, which keep
    what they make profiled; each is there only where the cache has it. Everything else, read, set or deleted, reaches
    the cache. `isinstance` says yes to this class and to the wrapped one. A saved list loads as the wrapped classes,
    also in a process without this package; its figures are not saved.

    A composite cache (CacheList) hands out its parts profiled, each counting for the whole layer. A recurrent state
    (ArraysCache) has no update to time; its bytes are looked at whenever an entry is set.

    While a cache is profiled, each update waits for its result, so mlx-lm's work ahead of the next token is lost, and
    so is the fusing of a layer's graph: the run is slower, its results are the same. Inside mx.compile or mx.vmap
    nothing can be timed, and update_and_fetch raises InvalidParams. What a conversion (to_quantized) costs is not in
    the times: it is computed before the next update is timed.
    """

    __slots__ = ()

    def __init__(self, cache: Any, layer_id: Any = 0) -> None:
        """Raises InvalidParams for an object that is no cache (neither update_and_fetch nor state)."""
        if isinstance(cache, type) or not (hasattr(cache, "update_and_fetch") or hasattr(cache, "state")):
            raise InvalidParams(
                f"cache is {quoted(cache)}, which has neither update_and_fetch nor state",
                hint="give one entry of the list that make_prompt_cache returns",
                field="cache",
            )
        put(self, cache, cache, Tally(cache, LayerProfile(layer_id, is_fused=True), _CLAIMS))

    @where_wrapped_has
    def update_and_fetch(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        """The cache's own, timed until what it returns and holds is computed. Returns its result unchanged.

        keys, values: (batch, KV heads, tokens, width). Adds tokens x 2 x key width to fp16_baseline_bytes. Further
        arguments go to the cache as they are; no byte of them is counted.
        """
        tally, whole = self._profiled_tally, self._profiled_whole
        result, ms = timed(whole, self._profiled_cache.update_and_fetch, keys, values, *args, **kwargs)
        tokens, width = tokens_and_width(keys)
        profile = tally.profile
        profile.n_quantize_calls += 1
        profile.quantize_ms_total += ms
        profile.tokens_written += tokens
        profile.fp16_baseline_bytes += tokens * _HALF * width
        profile.true_fp16_bytes += fp16_bytes(keys, values)
        tally.update(tally.after_call(whole), ms, 1)
        return result

    def profile(self) -> LayerProfile:
        """What was counted so far, and what the cache holds now. A copy: it does not change later."""
        self._profiled_tally.look(self._profiled_whole)
        return self._profiled_tally.snapshot()

    def reset(self) -> None:
        """Count from zero. The cache and what it stores stay as they are."""
        self._profiled_tally.reset(self._profiled_whole)

    def batch_profile(self) -> LayerProfile | None:
        """The profile of the batch cache that this one was extracted from, as it was then; None where there was none.

        mlx-lm gives the extracted caches with each finished sequence: that is where a batch's figures are found.
        """
        batch = self._profiled_tally.batch
        return None if batch is None else dataclasses.replace(batch)

    @where_wrapped_has
    def merge(self, caches: Sequence[Any]) -> Any:
        """The batch cache of several caches, profiled from zero under this layer's label."""
        return self._fresh(self._profiled_cache.merge([unwrapped(cache) for cache in caches]))

    @where_wrapped_has
    def extend(self, other: Any) -> None:
        """Add the rows of another batch cache."""
        self._profiled_cache.extend(unwrapped(other))
        self._profiled_tally.after_call(self._profiled_whole)

    @where_wrapped_has
    def extract(self, *args: Any, **kwargs: Any) -> Any:
        """The cache of one row, profiled from zero under this layer's label; the batch's figures are at the row."""
        row = self._fresh(self._profiled_cache.extract(*args, **kwargs))
        row._profiled_tally.batch = self.profile()  # noqa: SLF001 -- of this class
        return row

    @where_wrapped_has
    def to_quantized(self, *args: Any, **kwargs: Any) -> Any:
        """The cache that mlx-lm puts in this one's place, profiled on from these counts."""
        return self._profiled_again(self._profiled_cache.to_quantized(*args, **kwargs))

    def _fresh(self, cache: Any) -> MLXCacheProfiler:
        return MLXCacheProfiler(cache, self._profiled_tally.profile.layer_id)

    def _profiled_special(self, name: str, *args: Any) -> Any:
        """As the wrapped class does; a part that can be updated comes out profiled."""
        result = super()._profiled_special(name, *args)
        if name != "__getitem__" or not hasattr(result, "update_and_fetch"):
            return result
        part = MLXCacheProfiler.__new__(MLXCacheProfiler, result)
        put(part, result, self._profiled_whole, self._profiled_tally)
        return part

"""Wrappers of all layers of a model -> one report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.errors import InvalidParams, quoted
from veloxquant.profiling.mlx_cache import MLXCacheProfiler
from veloxquant.profiling.report import ProfileReport
from veloxquant.profiling.standalone import KVCacheProfiler

if TYPE_CHECKING:
    from collections.abc import Iterable


def profile_layers(profilers: Iterable[KVCacheProfiler | MLXCacheProfiler], elapsed_s: float = 0.0) -> ProfileReport:
    """Profiles of all wrappers, in their order; copies, which later calls do not change.

    elapsed_s: wall time in seconds that they cover. Raises InvalidParams for a time that is negative or not finite,
    and for an entry that is no wrapper.
    """
    wrappers = list(profilers)
    for position, one in enumerate(wrappers):
        if not isinstance(one, KVCacheProfiler | MLXCacheProfiler):
            raise InvalidParams(
                f"profilers[{position}] is {quoted(one)}, which is not profiled",
                hint="wrap each cache before the run: [MLXCacheProfiler(c, i) for i, c in enumerate(caches)]",
                field="profilers",
            )
    return ProfileReport([one.profile() for one in wrappers], elapsed_s)

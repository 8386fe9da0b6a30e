"""A second witness: what a cache's arrays take by walking them, against what MLX's allocator gave out."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import arrays

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE = 16384  # bytes of a memory page on Apple silicon, the largest of any machine MLX runs on


@dataclass(frozen=True)
class AllocatorCheck:
    """By how much a use of a cache made both counts grow, in bytes."""

    resident_bytes: int
    """Growth of the bytes of the arrays reachable from the cache."""
    allocated_bytes: int
    """Growth of mx.get_active_memory(), after the results of the use were dropped."""
    more_bytes: int
    """How much more the allocator may have given: it rounds each buffer that is now held up to a page."""
    less_bytes: int
    """How much less it may have given: buffers held before may have been larger than asked, by a page, and by the
    smaller of their size and two pages where a freed one was used again; giving those up gives up more."""

    @property
    def agrees(self) -> bool:
        """Nothing is held that the walk does not see, and the walk counts nothing that is not there."""
        return -self.less_bytes <= self.allocated_bytes - self.resident_bytes <= self.more_bytes


def allocator_check(cache: Any, use: Callable[[Any], object]) -> AllocatorCheck:
    """Run `use(cache)` and compare by how much the walk and the allocator grew.

    What `use` itself keeps, and what any code makes once a process, counts as hidden; so check a second use. Other
    threads must not compute meanwhile. MLX reuses no freed buffers during the check, so that each has the size asked.
    """
    import mlx.core as mx

    limit = mx.set_cache_limit(0)
    try:
        before, active = _settled(cache)
        use(cache)
        after, now_active = _settled(cache)
    finally:
        mx.set_cache_limit(limit)
    return AllocatorCheck(
        resident_bytes=sum(after) - sum(before),
        allocated_bytes=now_active - active,
        more_bytes=_PAGE * len(after),
        less_bytes=sum(_PAGE + min(size, 2 * _PAGE) for size in before),
    )


def _settled(cache: Any) -> tuple[list[int], int]:
    """(bytes of each array, active bytes) once everything is computed and everything dropped is gone."""
    import mlx.core as mx

    mx.eval(list(arrays(cache)))
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return [array.nbytes for array in arrays(cache)], int(mx.get_active_memory())

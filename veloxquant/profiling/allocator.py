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
    slack_bytes: int
    """How much more the allocator may have given for the arrays now held: it rounds a buffer up to a page, and Metal's
    may hand out a freed buffer that is larger than asked by less than the smaller of that size and two pages."""

    @property
    def agrees(self) -> bool:
        """Nothing is held that the walk does not see, and the walk counts nothing that is not there."""
        return self.resident_bytes <= self.allocated_bytes <= self.resident_bytes + self.slack_bytes


def allocator_check(cache: Any, use: Callable[[Any], object]) -> AllocatorCheck:
    """Run `use(cache)` and compare by how much the walk and the allocator grew.

    What `use` itself keeps, and what any code makes once a process, counts as hidden; so check a second use. Other
    threads must not compute meanwhile.
    """
    walked, active, _ = _counts(cache)
    use(cache)
    now_walked, now_active, slack = _counts(cache)
    return AllocatorCheck(now_walked - walked, now_active - active, slack)


def _counts(cache: Any) -> tuple[int, int, int]:
    """(walked bytes, active bytes, slack) once everything is computed and everything dropped is gone."""
    import mlx.core as mx

    mx.eval(list(arrays(cache)))
    mx.synchronize()
    gc.collect()
    sizes = [array.nbytes for array in arrays(cache)]
    return sum(sizes), int(mx.get_active_memory()), sum(_PAGE + min(size, 2 * _PAGE) for size in sizes)

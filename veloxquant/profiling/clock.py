"""Timing a call on lazy arrays: what it is given is computed before the clock starts, what it makes before it stops."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import arrays
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from collections.abc import Callable

_MS = 1e3


def timed(cache: Any, call: Callable[..., Any], *inputs: Any, **named: Any) -> tuple[Any, float]:
    """`call(*inputs, **named)`, a use of `cache`: (its result unchanged, ms).

    Before: inputs and all arrays of the cache are evaluated and the stream is drained, so that neither the model's work
    nor another call's is counted. After: every array of the result, in any nesting, and every array that the cache now
    holds is evaluated, so that work which is only promised is counted. Walking to those arrays is not counted. What the
    walk does not see (`caches.held` says what) is not evaluated by it, and its promised work is in no figure.

    Raises InvalidParams inside mx.compile or mx.vmap, where no array has a value and nothing can be timed.
    """
    import mlx.core as mx

    _compute(cache, inputs, named)
    mx.synchronize()
    began = perf_counter()
    result = call(*inputs, **named)
    called = perf_counter()
    made = list(arrays(cache, result))
    resumed = perf_counter()
    mx.eval(made)
    return result, (perf_counter() - resumed + called - began) * _MS


def _compute(*given: Any) -> None:
    """Evaluate what a call is given.

    A function of its own: a list of the arrays that lived on would keep buffers from being written in place, and the
    call would be timed with a copy that it does not make otherwise.
    """
    import mlx.core as mx

    try:
        mx.eval(list(arrays(*given)))
    except ValueError as error:
        raise InvalidParams(
            f"a profiled cache cannot be timed here: {error}",
            hint="call the model outside mx.compile and mx.vmap while its caches are profiled",
        ) from error

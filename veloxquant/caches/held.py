"""What a cache really holds, found by walking it: `nbytes` of a cache class is a claim, this is the count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType)


def arrays(root: Any) -> Iterator[Any]:
    """Every distinct mx.array reachable from a cache or a list of caches, each once.

    Follows lists, tuples, sets, queues, mappings and the attributes of objects; not classes, functions, modules, or
    the layers of a neural network (a cache that points back at its model does not hold the weights).
    """
    import mlx.core as mx
    from mlx import nn

    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _LEAVES) or callable(value) or isinstance(value, nn.Module) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept alive, so that no id is used twice
        if isinstance(value, mx.array):
            yield value
        else:
            waiting.extend(_inside(value))


def held_bytes(caches: Any) -> int:
    """Bytes of all arrays reachable from a cache, or from a list of them, slack included."""
    return sum(array.nbytes for array in arrays(caches))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return [*getattr(value, "__dict__", {}).values(), *_slots(value)]


def _slots(value: Any) -> Iterator[Any]:
    for cls in type(value).__mro__:
        names = getattr(cls, "__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(value, name, None)

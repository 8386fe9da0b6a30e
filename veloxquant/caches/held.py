"""What a cache really holds, found by walking it: `nbytes` of a cache class is a claim, this is the count.

The walk asks the interpreter what each object refers to, as its garbage collector does, and so runs no code of the
objects: no property, no iterator and no `__getattr__` of theirs can lie to it, change them or keep it busy, and it ends
because every object is visited once.

Seen: attributes in `__dict__` and in slots under whatever name, items and keys of containers and of their subclasses,
cells, defaults and attributes of functions, bound methods, partials, iterators, suspended generators.

Not seen: what is kept by a class (also in closures of its methods), a module or a global name, behind a weak
reference, in a frame or traceback, in an array of another library or in an extension's object that the garbage
collector cannot look into; and the layers of a neural network (a cache that points back at its model does not hold the
weights).
"""

from __future__ import annotations

import builtins
from gc import get_referents
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BUILTINS = vars(builtins)
_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), type})
"""By far the most of what a cache refers to; exactly these types, as a subclass may carry attributes."""

_CLOSED = (type, ModuleType, CodeType, FrameType, TracebackType)
_CACHE_FUNCTIONS = ("update_and_fetch", "append_key")


def arrays(*roots: Any) -> Iterator[Any]:
    """Every distinct mx.array reachable from caches or lists of caches, each once.

    What is given is looked into also where it is a module of a neural network; below that only modules with
    update_and_fetch or append_key are.
    """
    import mlx.core as mx

    seen = {id(root): root for root in roots if not issubclass(type(root), _CLOSED)}  # kept: no id is used twice
    waiting = list(seen.values())
    while waiting:
        value = waiting.pop()
        if type(value) is mx.array:
            yield value
            continue
        for inner in _inside(value):
            if type(inner) not in _LEAVES and id(inner) not in seen and _is_open(inner):
                seen[id(inner)] = inner
                waiting.append(inner)


def held_bytes(caches: Any) -> int:
    """Bytes of all arrays reachable from a cache, or from a list of them, slack included.

    Each array counts with its own size: two views of one buffer count twice, and a slice counts as what it shows though
    it keeps the whole buffer.
    """
    return sum(array.nbytes for array in arrays(caches))


def _inside(value: Any) -> Iterable[Any]:
    inner = get_referents(value)
    if type(value) is not FunctionType:
        return inner
    return [one for one in inner if one is not value.__globals__ and one is not _BUILTINS]


def _is_open(value: Any) -> bool:
    """Whether to look into it. Asks the type alone: `__class__` may be a property."""
    from mlx import nn

    kind = type(value)
    if issubclass(kind, _CLOSED):
        return False
    return not issubclass(kind, nn.Module) or any(hasattr(kind, name) for name in _CACHE_FUNCTIONS)

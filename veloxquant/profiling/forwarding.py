"""A wrapper that is taken for what it wraps: everything but its own few functions reaches the wrapped object.

What a reader of `mlx_lm` may do with a cache decides what is needed here:
- attributes are read, set and deleted, and `hasattr` decides which path a cache takes (bits, merge, to_quantized);
- `cache[0]`, `len(cache)` and other special methods are looked up on the class, not on the object;
- `isinstance` asks the object's `__class__`, and a saved prompt cache records `type(cache).__name__`;
- a falsy cache is taken for none.
So each wrapped class gets a wrapper class of its own, with its name and its special methods.
"""

from __future__ import annotations

import copy
import functools
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from veloxquant.profiling.tally import Tally

F = TypeVar("F", bound="Callable[..., Any]")

_SPECIAL = (
    *("__len__", "__length_hint__", "__getitem__", "__setitem__", "__delitem__", "__contains__"),
    *("__iter__", "__next__", "__reversed__", "__call__", "__enter__", "__exit__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
)
_OWN = ("_profiled_cache", "_profiled_tally", "_profiled_whole")


class _Where:
    """A function of the wrapper that is there only on objects whose wrapped cache has what it needs."""

    def __init__(self, function: Callable[..., Any], needs: Callable[[Any], object]) -> None:
        self._function = function
        self._needs = needs
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        self._needs(instance._profiled_cache)  # noqa: SLF001 -- AttributeError is the answer
        return MethodType(self._function, instance)


def where_wrapped_has(function: F) -> F:
    """Decorator: keep `hasattr` truthful for this function, which needs the cache's of the same name."""
    return where_wrapped(attrgetter(function.__name__))(function)


def where_wrapped(needs: Callable[[Any], object]) -> Callable[[F], F]:
    """Decorator like where_wrapped_has; `needs(cache)` reads what the function uses, so that AttributeError says no."""

    def decorated(function: F) -> F:
        return cast("F", _Where(function, needs))

    return decorated


class Forwarding:
    """Base of both wrappers. Its own state lies in slots, so that even `vars()` gives the wrapped object's."""

    __slots__ = ("__weakref__", *_OWN)
    _profiled_cache: Any
    _profiled_tally: Tally
    _profiled_whole: Any  # whose memory is counted: the wrapped cache, or for one part of a composite, all of it

    def __new__(cls, cache: Any, *_: Any, **__: Any) -> Self:  # noqa: D102 -- as __init__ says
        return cast("Self", _new(cls, cache))

    @property  # type: ignore[misc]  # set it, and the wrapped object's is set
    def __class__(self) -> Any:
        return self._profiled_cache.__class__

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # asked before they are set, while a copy is being made
            raise AttributeError(name)
        return getattr(self._profiled_cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._profiled_cache, name, value)
        self._profiled_tally.after_call(self._profiled_whole)

    def __delattr__(self, name: str) -> None:
        delattr(self._profiled_cache, name)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> Iterable[str]:
        own = {name for name, one in _attributes(type(self)) if not isinstance(one, _Where) or hasattr(self, name)}
        return sorted(own | {*dir(self._profiled_cache)})

    def __repr__(self) -> str:
        label = self._profiled_tally.profile.layer_id
        return f"{_base(type(self)).__name__}({self._profiled_cache!r}, layer_id={label!r})"

    def __copy__(self) -> Self:
        return self._profiled_again(copy.copy(self._profiled_cache))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._profiled_again(copy.deepcopy(self._profiled_cache, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as its base, its counts and the cache, whose own way of being pickled decides whether it works."""
        base = _base(type(self))
        return _unpickled, (base, {name: getattr(self, name) for name in _slots(base)})

    def _profiled_again(self, cache: Any) -> Self:
        """A wrapper of another cache that goes on from a copy of these counts."""
        other = cast("Self", _new(type(self), cache))
        put(other, cache, cache, self._profiled_tally.copy())
        return other

    def _profiled_special(self, name: str, *args: Any) -> Any:
        """A special method of the wrapped class, called as the interpreter would."""
        cache = self._profiled_cache
        result = getattr(type(cache), name)(cache, *(unwrapped(one) for one in args))
        if name in ("__setitem__", "__delitem__"):
            self._profiled_tally.after_call(self._profiled_whole)
        return result


def put(wrapper: Forwarding, cache: Any, whole: Any, tally: Tally) -> None:
    """Give a wrapper its state, past its own __setattr__."""
    for name, value in zip(_OWN, (cache, tally, whole), strict=True):
        object.__setattr__(wrapper, name, value)


def _slots(base: type) -> list[str]:
    """Names of what a wrapper itself holds."""
    return [name for one in base.__mro__ for name in vars(one).get("__slots__", ()) if name.startswith("_profiled")]


def _unpickled(base: Any, own: dict[str, Any]) -> Any:
    """The wrapper that `__reduce_ex__` took apart."""
    wrapper = _new(base, own["_profiled_cache"])
    for name, value in own.items():
        object.__setattr__(wrapper, name, value)
    return wrapper


def unwrapped(value: Any) -> Any:
    """The cache inside a wrapper; anything else as it is."""
    return value._profiled_cache if issubclass(type(value), Forwarding) else value  # noqa: SLF001 -- this file's own


def _new(cls: Any, cache: Any) -> Any:
    """A wrapper for this cache, without state yet."""
    wrapped: Any = type(cache)
    return object.__new__(_class_for(_base(cls), wrapped))


def _base(cls: Any) -> Any:
    """MLXCacheProfiler, KVCacheProfiler or what a user made of them; not the class made for one wrapped class."""
    return getattr(cls, "_profiled_base", cls)


def _attributes(cls: type) -> Iterable[tuple[str, Any]]:
    return ((name, value) for one in cls.__mro__ for name, value in vars(one).items())


@functools.lru_cache(maxsize=256)
def _class_for(base: Any, wrapped: Any) -> Any:
    """A subclass of `base` with the name and the special methods of `wrapped`."""
    defined = dict(reversed(list(_attributes(wrapped))))  # what stands first in the order of resolution wins
    names = [name for name in _SPECIAL if name in defined and defined[name] is not vars(object).get(name)]
    special = {name: None if defined[name] is None else _forwarded(name) for name in names}
    members = {"__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__, "_profiled_base": base}
    return type(wrapped.__name__, (base,), {**members, **special})


def _forwarded(name: str) -> Callable[..., Any]:
    def special(self: Forwarding, *args: Any) -> Any:
        return self._profiled_special(name, *args)

    special.__name__ = name
    return special

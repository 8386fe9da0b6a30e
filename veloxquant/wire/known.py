"""What an object of the protocol takes, in words: the way out of an error about a field."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = type[msgspec.Struct]


def unknown_field(kind: Kind, path: Sequence[str], name: str) -> str:
    """For a name that the object at this path does not have: the one that is meant, else all it has."""
    owner, where = _at(kind, path)
    names = [field.encode_name for field in msgspec.structs.fields(owner)]
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"{where or 'it'} takes {', '.join(names) or 'nothing'}"


def wrong_value(kind: Kind, path: Sequence[str]) -> str:
    """For a value that is refused: what there is to choose from, else whether it can be left out."""
    owner, _ = _at(kind, path[:-1])
    name = path[-1].partition("[")[0] if path else ""
    field = next((one for one in msgspec.structs.fields(owner) if one.encode_name == name), None)
    if field is None:
        return "give an object"
    if choices := list(_choices(field.type)):
        return f"use {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
    return f"give {name} as the message says" + ("" if field.required else ", or leave it out")


def _at(kind: Kind, path: Sequence[str]) -> tuple[Kind, str]:
    """The innermost object that the path leads to, and the name that holds it."""
    where = ""
    for name in path:
        field = next((one for one in msgspec.structs.fields(kind) if one.encode_name == name), None)
        inner = None if field is None else _struct_in(field.type)
        if inner is None:
            break
        kind, where = inner, name
    return kind, where


def _struct_in(hint: Any) -> Kind | None:
    """The struct in a type such as `Struct | None`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for one in get_args(hint) if (found := _struct_in(one)) is not None), None)


def _choices(hint: Any) -> Iterator[str]:
    """The words of a Literal, wherever in the type it stands."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
        return
    for one in get_args(hint):
        yield from _choices(one)

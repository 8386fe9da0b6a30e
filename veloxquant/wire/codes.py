"""Errors over the socket: a VeloxError becomes a JSON-RPC error object, and the same class again on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from veloxquant import errors
from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEXT_LIMIT = 4096  # an error that quotes its input must not quote all of it


class ErrorData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`error.data`: the stable name, what to do next, and the offending field where there is one."""

    name: str = ""
    hint: str = msgspec.field(default="")
    field: str | None = None


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """`error` of an answer, as JSON-RPC 2.0 has it."""

    code: int = VeloxError.rpc_code
    message: str = ""
    data: ErrorData = ErrorData()


def _tree(root: type[VeloxError]) -> Iterator[type[VeloxError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


# Inner nodes of the tree share names with their leaves (RequestError and InvalidRequest are both invalid_request), and
# what inherits its parent's name is not a kind of its own. The leaf, which comes later, wins.
BY_NAME: dict[str, type[VeloxError]] = {
    kind.name: kind
    for kind in _tree(VeloxError)
    if kind.__module__ == errors.__name__ and (kind is VeloxError or kind.name != VeloxError.name)
}


def to_object(error: VeloxError) -> ErrorObject:
    """What travels. Text that is not valid Unicode (a file name, say) is replaced, so that encoding cannot fail."""
    return ErrorObject(
        code=error.rpc_code,
        message=_clean(error.message),
        data=ErrorData(
            name=error.name, hint=_clean(error.hint), field=None if error.field is None else _clean(error.field)
        ),
    )


def from_object(error: ErrorObject) -> VeloxError:
    """The typed error an answer stands for; a name from a newer daemon is a plain VeloxError with the same text."""
    kind = BY_NAME.get(error.data.name, VeloxError)
    return kind(error.message, hint=error.data.hint, field=error.data.field)


def _clean(text: str) -> str:
    if len(text) > _TEXT_LIMIT:
        text = text[:_TEXT_LIMIT] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")

"""Requests, answers and notices: bytes to typed values and back.

JSON-RPC 2.0, one object a line, no batches, no notifications from clients. Ids are strings of at most 256 characters
or whole numbers of at most 2**53. A name that stands twice in one object counts once, with its last value, as every
JSON parser in common use has it. A carriage return before the newline is white space. Decoding is strict JSON:
no NaN, no Infinity, no lone surrogates, no bytes that are not UTF-8.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from veloxquant.errors import (
    MAX_WHOLE,
    InvalidParams,
    InvalidRequest,
    NotAnswering,
    ParseError,
    UnknownMethod,
    VeloxError,
)
from veloxquant.wire import codes, known
from veloxquant.wire.codes import ErrorObject
from veloxquant.wire.frames import ANSWER_LIMIT_BYTES, REQUEST_LIMIT_BYTES, too_large
from veloxquant.wire.params import (
    PARAMS,
    EngineParams,
    ExplainParams,
    FitParams,
    FitWorkload,
    HardwareOverrides,
    HardwareParams,
    HelloParams,
    MethodsParams,
    ModelParams,
    NoParams,
    Params,
    PlanParams,
    RecordsParams,
    SubscribeParams,
    UnsubscribeParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "PARAMS",
    "Answer",
    "EngineParams",
    "Envelope",
    "ExplainParams",
    "FitParams",
    "FitWorkload",
    "HardwareOverrides",
    "HardwareParams",
    "HelloParams",
    "MethodsParams",
    "ModelParams",
    "NoParams",
    "Params",
    "PlanParams",
    "RecordsParams",
    "Request",
    "RequestId",
    "SubscribeParams",
    "UnsubscribeParams",
    "convert_params",
    "decode_answer",
    "decode_envelope",
    "decode_params",
    "decode_request",
    "decode_result",
    "encode_error",
    "encode_notice",
    "encode_request",
    "encode_result",
    "salvage_id",
]

PROTOCOL = 1

RequestId = Annotated[int, Meta(ge=-MAX_WHOLE, le=MAX_WHOLE)] | Annotated[str, Meta(max_length=256)]
T = TypeVar("T")


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request whose params are still bytes."""

    jsonrpc: Literal["2.0"]
    id: RequestId
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request, decoded and validated. `raw` is the params as they came."""

    id: int | str
    method: str
    params: Params
    raw: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back: a result, an error, or (with a method and no id) a notice. Unknown fields are ignored."""

    jsonrpc: Literal["2.0"]
    id: RequestId | None = None
    result: msgspec.Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET
    method: str | None = None
    params: msgspec.Raw | UnsetType = UNSET


class _IdOnly(msgspec.Struct, frozen=True):
    id: RequestId | None = None


class _Outgoing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    jsonrpc: str
    id: int | str | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    params: Any = UNSET
    result: Any = UNSET
    error: ErrorObject | UnsetType = UNSET


_ENVELOPE = msgspec.json.Decoder(Envelope)
_ID_ONLY = msgspec.json.Decoder(_IdOnly)
_ANSWER = msgspec.json.Decoder(Answer)
_DECODERS = {method: msgspec.json.Decoder(kind) for method, kind in PARAMS.items()}
_ENCODER = msgspec.json.Encoder()

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_NAMED = re.compile(r"^Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)
SAME_VERSION = "install the same veloxquant version on both sides"
_WORKLOAD_FIELDS = frozenset(msgspec.structs.asdict(PlanParams(model=ModelParams(id="x")).workload))


def decode_envelope(frame: bytes) -> Envelope:
    """The outer object of a request. Raises ParseError or InvalidRequest."""
    return _decode(_ENVELOPE, frame, InvalidRequest, "the request")


def decode_params(method: str, raw: bytes | msgspec.Raw) -> Params:
    """The params of `method`. Raises UnknownMethod, ParseError, or InvalidParams with the path of the field."""
    _params_of(method)
    return _decode(_DECODERS[method], raw, InvalidParams, f"params of {method}")


def decode_request(frame: bytes) -> Request:
    """Both steps at once."""
    envelope = decode_envelope(frame)
    raw = bytes(envelope.params)
    return Request(id=envelope.id, method=envelope.method, params=decode_params(envelope.method, raw), raw=raw)


def convert_params(method: str, params: Any) -> Params:
    """Typed params from Python values (a mapping, or a Params struct built by hand), under the socket's rules.

    Checks before it encodes: JSON would turn a NaN into null, which means "not given".
    """
    try:
        plain = msgspec.to_builtins(params)
        _ENCODER.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise InvalidParams(
            f"params of {method} cannot be written as JSON: {problem}",
            hint="use numbers, text, lists and mappings",
            field="params",
        ) from problem
    return _checked(
        lambda: msgspec.convert(plain, _params_of(method)), InvalidParams, f"params of {method}", _params_of(method)
    )


def salvage_id(frame: bytes) -> int | str | None:
    """The id of a request that is otherwise wrong, None where there is none to be had."""
    try:
        return _ID_ONLY.decode(frame).id
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def decode_answer(frame: bytes) -> Answer:
    """An answer or a notice. Raises NotAnswering when the other side does not speak the protocol."""
    return _decode(_ANSWER, frame, NotAnswering, "the answer")


def decode_result(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """A result as the type the caller expects. Raises NotAnswering when it does not fit."""
    return _decode(msgspec.json.Decoder(kind), raw, NotAnswering, "the result")


def encode_request(request_id: int | str, method: str, params: Any = UNSET) -> bytes:
    """One line. `params` is what `convert_params` gave, or left out. Raises FrameTooLarge."""
    line = _ENCODER.encode(_Outgoing(jsonrpc="2.0", id=request_id, method=method, params=params))
    if len(line) > REQUEST_LIMIT_BYTES:
        raise too_large(REQUEST_LIMIT_BYTES)
    return line + b"\n"


def encode_result(request_id: int | str, result: Any) -> bytes:
    """One line; `result` may be msgspec.Raw, bytes already encoded. One over the limit becomes an error answer."""
    line = _ENCODER.encode(_Outgoing(jsonrpc="2.0", id=request_id, result=result))
    if len(line) > ANSWER_LIMIT_BYTES:
        return encode_error(request_id, too_large(ANSWER_LIMIT_BYTES))
    return line + b"\n"


def encode_error(request_id: int | str | None, error: VeloxError) -> bytes:
    """One line. Cannot fail: the text of an error is bounded and made valid Unicode."""
    return _ENCODER.encode(_Outgoing(jsonrpc="2.0", id=request_id, error=codes.to_object(error))) + b"\n"


def encode_notice(method: str, params: Any) -> bytes:
    """One line that answers nothing: what a subscriber is told."""
    return _ENCODER.encode(_Outgoing(jsonrpc="2.0", method=method, params=params)) + b"\n"


def _params_of(method: str) -> type[Params]:
    kind = PARAMS.get(method)
    if kind is None:
        raise UnknownMethod(
            f"there is no call {method[:64]!r}", hint=f"the calls are {', '.join(sorted(PARAMS))}", field="method"
        )
    return kind


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw, wrong: type[VeloxError], what: str) -> T:
    return _checked(lambda: decoder.decode(data), wrong, what, decoder.type)


def _checked(read: Callable[[], T], wrong: type[VeloxError], what: str, kind: Any) -> T:
    """Run `read`, and turn each way it can fail into a typed error."""
    try:
        return read()
    except msgspec.ValidationError as problem:
        raise _invalid(wrong, what, str(problem), kind) from None
    except InvalidParams as problem:  # from a struct's own check; a workload does not know where it stands
        if problem.field in _WORKLOAD_FIELDS:
            problem.field = f"workload.{problem.field}"
        raise
    except RecursionError:
        text = "it nests too deeply"
    except ValueError as problem:  # malformed JSON, bad UTF-8, a number of thousands of digits
        text = str(problem)
    if wrong is NotAnswering:
        raise NotAnswering(f"{what} cannot be read: {text}", hint=SAME_VERSION)
    raise ParseError(f"{what} cannot be read: {text}", hint="send one JSON object in UTF-8 on one line")


def _invalid(wrong: type[VeloxError], what: str, text: str, kind: Any) -> VeloxError:
    """The typed error for a well-formed value of the wrong shape, with the path of the field."""
    path = _PATH.search(text)
    reason = text[: path.start()] if path else text
    parts = [path.group(1).lstrip(".")] if path and path.group(1) else []
    named = _NAMED.match(reason)
    hint = SAME_VERSION if wrong is NotAnswering else _way_out(kind, parts[0].split(".") if parts else [], named)
    if named is not None:
        parts.append(named.group(2))
        reason = f"{'unknown' if named.group(1) == 'contains unknown' else 'missing'} field {'.'.join(parts)!r}"
    elif parts:
        reason = f"{reason} in {'.'.join(parts)!r}"
    whole = "params" if wrong is InvalidParams else None
    return wrong(f"{what}: {reason}", hint=hint, field=".".join(parts) or whole)


def _way_out(kind: Any, path: Sequence[str], named: re.Match[str] | None) -> str:
    if named is None:
        return known.wrong_value(kind, path)
    if named.group(1) == "contains unknown":
        return known.unknown_field(kind, path, named.group(2))
    return f"give {named.group(2)}"

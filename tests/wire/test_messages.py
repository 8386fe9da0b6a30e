"""Any bytes give a request or a typed error that says which field is wrong."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import (
    FrameTooLarge,
    InvalidParams,
    InvalidRequest,
    NotAnswering,
    ParseError,
    RequestError,
    UnknownMethod,
    VeloxError,
)
from veloxquant.wire import answers, messages
from veloxquant.wire.frames import ANSWER_LIMIT_BYTES, REQUEST_LIMIT_BYTES

PLAN = {"model": {"path": "/m"}}
DEEP = 2_000_000
"""Levels that no reader's stack holds: from Python 3.14 on it is its size that ends them, not a count."""


def frame(**changes: Any) -> bytes:
    """A good request, with changes; a change to None removes the field."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "plan", "params": PLAN} | changes
    return json.dumps({name: value for name, value in message.items() if value is not ...}).encode()


def refused(data: bytes) -> VeloxError:
    """The typed error that decoding these bytes ends in."""
    with pytest.raises(VeloxError) as caught:
        messages.decode_request(data)
    assert caught.value.hint
    return caught.value


def test_a_request_is_decoded() -> None:
    """Id, method, typed params and the params' own bytes come out."""
    request = messages.decode_request(b'{"jsonrpc":"2.0","id":"a","method":"plan","params": {"model":{"id":"o/n"}} }')
    assert (request.id, request.method, request.raw) == ("a", "plan", b'{"model":{"id":"o/n"}}')
    assert isinstance(request.params, messages.PlanParams)
    assert request.params.model.id == "o/n"


@pytest.mark.parametrize("good", [0, -(2**53), 2**53, "", "é" * 256])
def test_ids_are_strings_or_whole_numbers(good: str | int) -> None:
    """A number is exact up to 2**53; a string may have 256 characters."""
    assert messages.decode_request(frame(id=good)).id == good


@pytest.mark.parametrize("bad", [2**53 + 1, 1.5, True, None, [], "x" * 257, 10**30])
def test_other_ids_are_refused(bad: Any) -> None:
    """Nothing else is an id, and null would make the answer ambiguous."""
    error = refused(frame(id=bad))
    assert (type(error), error.field) == (InvalidRequest, "id")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ...}, "id"),  # a notification: clients send none
        ({"method": ...}, "method"),
        ({"jsonrpc": ...}, "jsonrpc"),
        ({"jsonrpc": "1.0"}, "jsonrpc"),
        ({"method": 3}, "method"),
        ({"extra": 1}, "extra"),
    ],
)
def test_the_outer_object_is_strict(change: dict[str, Any], field: str) -> None:
    """A missing, wrong or unknown outer field is an invalid request that names it."""
    error = refused(frame(**change))
    assert (type(error), error.field) == (InvalidRequest, field)


def test_a_batch_is_refused() -> None:
    """One object a line."""
    assert type(refused(b"[" + frame() + b"]")) is InvalidRequest
    assert type(refused(b"[" * 200_000)) is InvalidRequest


def test_an_unknown_call_lists_the_calls() -> None:
    """The way out of a misspelt method is in the hint."""
    error = refused(frame(method="plam"))
    assert type(error) is UnknownMethod
    assert "plan" in error.hint


@pytest.mark.parametrize(
    "bytes_in",
    [
        b"",
        b"\x00",
        b"{",
        b"GET / HTTP/1.1",
        b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{}} x',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","params":NaN}',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":Infinity}}',
        b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"pi\x00ng"}',
        b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"path":"\xff"}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"path":"\\udc00"}}}',
        b"\xef\xbb\xbf" + b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","params":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    ],
)
def test_what_is_not_json_is_a_parse_error(bytes_in: bytes) -> None:
    """Strict JSON in UTF-8 only: no NaN, lone surrogates, NUL, marks, trailing text or bottomless nesting."""
    assert type(refused(bytes_in)) is ParseError


def test_a_carriage_return_is_white_space() -> None:
    """Clients that end lines with CRLF are understood."""
    assert messages.decode_request(frame() + b"\r").method == "plan"


def test_of_a_doubled_name_the_last_counts() -> None:
    """As in every JSON parser in common use; docs/protocol.md says so."""
    doubled = b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping","method":"plan","params":{"model":{"id":"a","id":"b"}}}'
    request = messages.decode_request(doubled)
    assert isinstance(request.params, messages.PlanParams)
    assert (request.id, request.params.model.id) == (2, "b")


def test_the_id_of_a_bad_request_is_saved_where_it_can_be() -> None:
    """An error answer goes to the call it is about."""
    assert messages.salvage_id(frame(extra=1, id="a")) == "a"
    assert messages.salvage_id(frame(id=[])) is None
    assert messages.salvage_id(b"[" * 200_000) is None
    assert messages.salvage_id(b'{"id":1') is None


@given(st.binary(max_size=300))
def test_r13_any_bytes_give_a_request_or_a_typed_error(data: bytes) -> None:
    """Decoding is total."""
    try:
        messages.decode_request(data)
    except RequestError:
        messages.salvage_id(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from([*messages.PlanParams.__struct_fields__, "plan_id", "topics", "limit", "protocol", "zzz"])


@given(st.sampled_from([*messages.PARAMS, "zork"]), JSON | st.dictionaries(FIELDS, JSON, max_size=4))
def test_r13_any_params_give_a_value_or_a_typed_error(method: str, params: Any) -> None:
    """Whatever JSON a call is given, the answer is typed params or an error of the request."""
    try:
        request = messages.decode_request(frame(method=method, params=params))
    except RequestError:
        return
    again = messages.encode_request(request.id, method, request.params)
    assert messages.decode_request(again[:-1]).params == request.params


def test_r13_mutated_requests_give_a_request_or_a_typed_error() -> None:
    """Good requests with bytes changed, cut, doubled or swapped never raise anything else."""
    dice = random.Random(7)  # noqa: S311 -- a repeatable walk
    seeds = [frame(), frame(params={"model": {"config": {"a": [1, 2.5, None]}}, "hardware": {"gpu_cores": 3}})]
    seeds += [frame(method=method, params={}) for method in messages.PARAMS]
    for _ in range(4000):
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(data))
            data[at : at + dice.randint(0, 3)] = dice.choice([b"", b"\xff", b'"', b"{", b"\\", b"9" * 30, b"\x00"])
            data = data or bytearray(b"x")
        try:
            messages.decode_request(bytes(data))
        except RequestError:
            messages.salvage_id(bytes(data))


def test_values_from_python_meet_the_same_rules() -> None:
    """A NaN built in Python does not slip through as null, and what JSON cannot hold is refused."""
    for bad in (
        {"model": {"id": "x"}, "hardware": {"bandwidth_gbps": float("nan")}},
        {"model": {"config": {"rope_theta": float("inf")}}},
        messages.PlanParams(model=messages.ModelParams(id="\ud800")),
        {"model": object()},
        None,
    ):
        with pytest.raises(InvalidParams):
            messages.convert_params("plan", bad)
    good = messages.convert_params("plan", PLAN)
    assert messages.decode_request(messages.encode_request(1, "plan", good)[:-1]).params == good
    with pytest.raises(UnknownMethod):
        messages.convert_params("zork", {})


def test_a_request_over_the_limit_is_not_sent() -> None:
    """The client hears it before the socket does."""
    with pytest.raises(FrameTooLarge) as caught:
        messages.encode_request(1, "plan", {"model": {"path": "x" * REQUEST_LIMIT_BYTES}})
    assert caught.value.message == f"a line is longer than {REQUEST_LIMIT_BYTES} bytes"


def test_an_answer_comes_back_typed() -> None:
    """Result bytes are decoded into what the caller expects; fields from a newer daemon are ignored."""
    line = messages.encode_result(7, {"pong": True, "pid": 3, "generation": 9, "mood": "fine"})
    answer = messages.decode_answer(line[:-1])
    assert isinstance(answer.result, msgspec.Raw)
    assert messages.decode_result(answer.result, answers.Pong) == answers.Pong(pid=3, generation=9)


def test_an_encoded_result_is_passed_through_byte_for_byte() -> None:
    """A remembered answer costs no second encoding."""
    line = messages.encode_result("a", msgspec.Raw(b'{"x": 1.50}'))
    assert line == b'{"jsonrpc":"2.0","id":"a","result":{"x": 1.50}}\n'


def test_r14_an_answer_over_the_limit_becomes_an_error() -> None:
    """The client gets a typed error under its id instead of a line it must refuse."""
    answer = messages.decode_answer(messages.encode_result(5, "x" * ANSWER_LIMIT_BYTES)[:-1])
    assert answer.id == 5
    assert isinstance(answer.error, msgspec.Struct)
    assert answer.error.data.name == "frame_too_large"


def test_an_error_without_an_id_says_null() -> None:
    """JSON-RPC: the id is null when it could not be read."""
    line = messages.encode_error(None, ParseError("x", hint="y"))
    assert json.loads(line)["id"] is None
    assert json.loads(line)["error"] == {"code": -32700, "message": "x", "data": {"name": "parse_error", "hint": "y"}}


def test_a_notice_has_no_id() -> None:
    """Subscribers tell notices from answers by it."""
    line = messages.encode_notice("notice", answers.Notice(event="changed", generation=3))
    assert "id" not in json.loads(line)
    answer = messages.decode_answer(line[:-1])
    assert (answer.method, answer.id) == ("notice", None)


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request", b"[]", b"{}", b'{"jsonrpc":"2.0","error":3}'])
def test_what_is_no_answer_is_not_answering(data: bytes) -> None:
    """A client that reached another program's socket gets a typed error."""
    with pytest.raises(NotAnswering):
        messages.decode_answer(data)


def test_a_result_of_another_shape_is_not_answering() -> None:
    """So does one whose daemon answers something else."""
    with pytest.raises(NotAnswering):
        messages.decode_result(b'{"pid":"x"}', answers.Pong)

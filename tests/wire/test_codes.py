"""Errors survive the socket with class, text, hint and field."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant import errors
from veloxquant.errors import InvalidParams, VeloxError
from veloxquant.wire import codes

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1] for line in PAGE.partition("## Errors")[2].splitlines() if line.startswith("| `")]
NAMES_ON_THE_PAGE = {name for row in ROWS for name in re.findall(r"`(\w+)`", row)}
"""The first column of the table of errors in docs/protocol.md."""


def round_trip(error: VeloxError) -> VeloxError:
    """Through JSON and back."""
    line = msgspec.json.encode(codes.to_object(error))
    return codes.from_object(msgspec.json.decode(line, type=codes.ErrorObject))


@pytest.mark.parametrize("kind", sorted(codes.BY_NAME.values(), key=lambda kind: kind.name))
def test_each_kind_comes_back_as_itself(kind: type[VeloxError]) -> None:
    """A client catches the class that the daemon raised."""
    back = round_trip(kind("what and why", hint="what next", field="a.b"))
    assert type(back) is kind
    assert (back.message, back.hint, back.field) == ("what and why", "what next", "a.b")


@pytest.mark.parametrize("kind", sorted(codes.BY_NAME.values(), key=lambda kind: kind.name))
def test_the_name_is_always_sent(kind: type[VeloxError]) -> None:
    """It is what a client that is not ours looks at."""
    sent = msgspec.json.decode(msgspec.json.encode(codes.to_object(kind("x"))))
    assert sent["data"]["name"] == kind.name
    assert sent["code"] == kind.rpc_code


def test_an_error_without_data_is_still_an_error() -> None:
    """Another JSON-RPC program may answer with code and message alone."""
    back = codes.from_object(msgspec.json.decode(b'{"code":-1,"message":"no"}', type=codes.ErrorObject))
    assert (type(back), back.message) == (VeloxError, "no")


def test_every_name_of_the_protocol_has_a_class() -> None:
    """No promised name is missing, nor one that the page does not promise."""
    assert set(codes.BY_NAME) == NAMES_ON_THE_PAGE


def test_every_leaf_of_the_tree_is_reachable() -> None:
    """A class added to the tree with a name of its own travels without a change here."""
    leaves = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VeloxError)}
    leaves = {kind for kind in leaves if not kind.__subclasses__()}
    assert {type(round_trip(kind("x"))) for kind in leaves} == leaves


def test_codes_are_distinct_and_in_the_json_rpc_range() -> None:
    """JSON-RPC reserves -32768 to -32000."""
    numbers = [kind.rpc_code for kind in codes.BY_NAME.values()]
    assert len(set(numbers)) == len(numbers)
    assert all(-32768 <= number <= -32000 for number in numbers)


def test_a_name_from_the_future_keeps_its_text() -> None:
    """A newer daemon's error is a VeloxError with the same sentence and hint."""
    data = codes.ErrorData(name="brand_new", hint="update the client")
    back = codes.from_object(codes.ErrorObject(code=-32099, message="something new", data=data))
    assert type(back) is VeloxError
    assert (back.message, back.hint) == ("something new", "update the client")


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_can_be_sent(message: str, hint: str) -> None:
    """Text with lone surrogates, as file names can hold, does not break the answer."""
    back = round_trip(InvalidParams(message + "\udcff", hint=hint, field="\ud800"))
    assert type(back) is InvalidParams


def test_an_error_that_quotes_its_input_is_cut() -> None:
    """An error answer stays small whatever it is about."""
    assert len(msgspec.json.encode(codes.to_object(InvalidParams("x" * 10**6, hint="y" * 10**6)))) < 10_000

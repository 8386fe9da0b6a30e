"""docs/protocol.md says what the code does: its examples decode, and nothing is missing from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from veloxquant.profiles import HardwareProfile, WorkloadProfile
from veloxquant.wire import answers, codes, messages
from veloxquant.wire.params import FitWorkload, HardwareOverrides, ModelParams, Params

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
LINES = [line.encode() for line in TEXT.splitlines() if line.startswith('{"jsonrpc"')]
DECODED = [msgspec.json.decode(line) for line in LINES]
REQUESTS = [line for line, value in zip(LINES, DECODED, strict=True) if "method" in value and "id" in value]
NOTICES = [line for line, value in zip(LINES, DECODED, strict=True) if "id" not in value]
RESULTS = {
    "hello": answers.Hello,
    "ping": answers.Pong,
    "explain": answers.Explanation,
    "methods": answers.MethodList,
    "records": answers.RecordPage,
    "hardware": HardwareProfile,
    "metrics": answers.Metrics,
    "reload": answers.Reloaded,
    "subscribe": answers.Subscribed,
    "unsubscribe": answers.Subscribed,
    "shutdown": answers.Stopping,
}


@pytest.mark.parametrize("line", REQUESTS)
def test_every_request_on_the_page_is_accepted(line: bytes) -> None:
    """Decoded under the daemon's own rules."""
    messages.decode_request(line)


def test_every_call_has_an_example() -> None:
    """No call is left to guessing."""
    assert {messages.decode_request(line).method for line in REQUESTS} == set(messages.PARAMS)


def test_every_answer_on_the_page_has_its_calls_type() -> None:
    """What follows a request, under its id, is what the client decodes."""
    calls = {value["id"]: value["method"] for value in DECODED if "method" in value and "id" in value}
    checked = set()
    for line, value in zip(LINES, DECODED, strict=True):
        if "result" not in value:
            continue
        answer = messages.decode_answer(line)
        assert isinstance(answer.result, msgspec.Raw)
        method = calls[value["id"]]
        messages.decode_result(answer.result, RESULTS.get(method, dict[str, Any]))
        checked.add(method)
    assert checked >= set(RESULTS)


@pytest.mark.parametrize("line", NOTICES)
def test_every_notice_on_the_page_is_one(line: bytes) -> None:
    """Both of them."""
    answer = messages.decode_answer(line)
    assert isinstance(answer.params, msgspec.Raw)
    messages.decode_result(answer.params, answers.Notice)


def fields(kind: type[msgspec.Struct]) -> set[str]:
    """Its fields' names."""
    return set(kind.__struct_fields__)


@pytest.mark.parametrize(
    "kind", [*messages.PARAMS.values(), ModelParams, HardwareOverrides, FitWorkload, WorkloadProfile]
)
def test_every_field_of_a_request_is_on_the_page(kind: type[Params]) -> None:
    """By its name, in an example or in code type."""
    assert {name for name in fields(kind) if f"`{name}`" not in TEXT and f'"{name}"' not in TEXT} == set()


def test_every_error_name_is_on_the_page() -> None:
    """With when it comes."""
    assert {name for name in codes.BY_NAME if f"`{name}`" not in TEXT} == set()


def test_the_error_on_the_page_is_the_error_we_make() -> None:
    """The example's own words come from the code."""
    (example,) = [value["error"] for value in DECODED if "error" in value]
    with pytest.raises(codes.VeloxError) as caught:
        messages.convert_params("plan", {"model": {"id": "x"}, "workload": {"context_length": -1}})
    assert msgspec.to_builtins(codes.to_object(caught.value)) == example

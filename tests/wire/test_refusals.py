"""What a refusal says, to the word, as people and programs read it beyond the socket; and where bounds lie."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from veloxquant.errors import FrameTooLarge, InvalidParams, NotAnswering, ParseError, UnknownMethod, VeloxError
from veloxquant.profiles import WorkloadProfile
from veloxquant.wire import codes, frames, known, messages
from veloxquant.wire.params import MAX_CONFIG_DEPTH, MAX_CONFIG_ITEMS, ExplainParams, FitWorkload, RecordsParams

SAME_VERSION = "install the same veloxquant version on both sides"
MODEL = {"path": "/m"}
DEEP = 2_000_000
"""Levels that no reader's stack holds: from Python 3.14 on it is its size that ends them, not a count."""
CONFIG_HINT = "send the model's config.json as it is published"


def said(error: VeloxError) -> tuple[str, str, str | None]:
    """Message, hint and field."""
    return error.message, error.hint, error.field


def refused(method: str, params: Any) -> tuple[str, str, str | None]:
    """What is said of these params, which come as they come over the socket."""
    with pytest.raises(InvalidParams) as caught:
        messages.decode_params(method, json.dumps(params).encode())
    return said(caught.value)


PARAMS_REFUSED: dict[str, tuple[str, Any, tuple[str, str, str]]] = {
    "two models": (
        "plan",
        {"model": {"path": "/m", "id": "o/n"}},
        (
            "model names path and id; it takes exactly one of path, id and config",
            'for example {"path": "/models/llama"} or {"id": "org/name"}',
            "model",
        ),
    ),
    "no model": (
        "plan",
        {"model": {}},
        (
            "model names nothing; it takes exactly one of path, id and config",
            'for example {"path": "/models/llama"} or {"id": "org/name"}',
            "model",
        ),
    ),
    "NUL": (
        "plan",
        {"model": {"path": "/m\0"}},
        ("model.path holds a NUL byte", "give a folder's path", "model.path"),
    ),
    "a size without a config": (
        "plan",
        {"model": {"path": "/m", "weights_bytes": 1}},
        (
            "model.weights_bytes goes with model.config only",
            "leave weights_bytes out: it is read from the model itself",
            "model.weights_bytes",
        ),
    ),
    "both": (
        "explain",
        {"plan_id": "p", "model": MODEL},
        (
            "explain takes either plan_id or model",
            "give the plan_id of an answer, or the params of the plan",
            "plan_id",
        ),
    ),
    "a workload beside a plan": (
        "explain",
        {"plan_id": "p", "workload": {}},
        ("workload does not go with plan_id", "a remembered plan has its own; leave it out", "workload"),
    ),
    "no time": (
        "records",
        {"since": "yesterday"},
        ("since is 'yesterday', which is no time", "write 2026-11-30 or 2026-11-30T08:00:00Z", "since"),
    ),
    "unknown": (
        "plan",
        {"model": MODEL, "engine": {"zzz": 1}},
        ("params of plan: unknown field 'engine.zzz'", "engine takes name, version", "engine.zzz"),
    ),
    "missing": ("plan", {}, ("params of plan: missing field 'model'", "give model", "model")),
    "wrong, and needed": (
        "plan",
        {"model": 1},
        ("params of plan: Expected `object`, got `int` in 'model'", "give model as the message says", "model"),
    ),
    "in a list": (
        "plan",
        {"model": MODEL, "methods": ["fp16", ""]},
        (
            "params of plan: Expected `str` of length >= 1 in 'methods[1]'",
            "give methods as the message says, or leave it out",
            "methods[1]",
        ),
    ),
}


@pytest.mark.parametrize(("method", "params", "expected"), PARAMS_REFUSED.values(), ids=PARAMS_REFUSED)
def test_params_are_refused_in_these_words(method: str, params: Any, expected: tuple[str, str, str]) -> None:
    """The field by its path, and what to send instead; to a program that has the values in hand, too."""
    assert refused(method, params) == expected
    with pytest.raises(InvalidParams) as caught:
        messages.convert_params(method, params)
    assert said(caught.value) == expected


def test_an_unknown_call_is_quoted_and_cut() -> None:
    """64 letters of it, with the calls there are."""
    with pytest.raises(UnknownMethod) as caught:
        messages.decode_params("x" * 100, b"{}")
    assert caught.value.message == f"there is no call {'x' * 64!r}"
    assert caught.value.hint == f"the calls are {', '.join(sorted(messages.PARAMS))}"
    assert caught.value.field == "method"


def test_values_that_json_cannot_hold() -> None:
    """Said of the call that they were for."""
    with pytest.raises(InvalidParams) as caught:
        messages.convert_params("plan", {"model": object()})
    message, *rest = said(caught.value)
    assert message.startswith("params of plan cannot be written as JSON: ")
    assert rest == ["use numbers, text, lists and mappings", "params"]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b'{"params": ' + b"[" * DEEP, "it nests too deeply"),
        (b'{"method"', "truncated"),
        (b'{"method": "\xff"}', "utf-8"),
    ],
)
def test_what_cannot_be_read_says_why(frame: bytes, why: str) -> None:
    """To a client that sent it, and to one that got it, who needs another version and not another message."""
    with pytest.raises(ParseError) as sent:
        messages.decode_envelope(frame)
    assert sent.value.message.startswith("the request cannot be read: ")
    assert why in sent.value.message.lower()
    assert sent.value.hint == "send one JSON object in UTF-8 on one line"
    with pytest.raises(NotAnswering) as got:
        messages.decode_answer(frame)
    assert got.value.message.startswith("the answer cannot be read: ")
    assert why in got.value.message.lower()
    assert got.value.hint == SAME_VERSION


def test_a_result_of_another_shape_blames_no_params() -> None:
    """It names the field where there is one; the way out is the same version on both sides."""
    with pytest.raises(NotAnswering) as caught:
        messages.decode_result(b'{"context_length": "long"}', WorkloadProfile)
    message, hint, field = said(caught.value)
    assert message == "the result: Expected `int`, got `str` in 'context_length'"
    assert (hint, field) == (SAME_VERSION, "context_length")
    with pytest.raises(NotAnswering) as caught:
        messages.decode_result(b"1", WorkloadProfile)
    assert said(caught.value) == ("the result: Expected `object`, got `int`", SAME_VERSION, None)
    with pytest.raises(NotAnswering) as caught:
        messages.decode_answer(b"1")
    assert caught.value.message == "the answer: Expected `object`, got `int`"


def test_a_notice_carries_its_params() -> None:
    """As they are."""
    line = messages.encode_notice("notice", {"a": [1]})
    assert json.loads(line) == {"jsonrpc": "2.0", "method": "notice", "params": {"a": [1]}}


def test_a_request_of_exactly_the_limit_is_sent() -> None:
    """One byte more is not, and the way out names what is usually large."""
    empty = len(messages.encode_request(1, "plan", {"x": ""})) - 1
    room = frames.REQUEST_LIMIT_BYTES - empty
    assert len(messages.encode_request(1, "plan", {"x": "a" * room})) == frames.REQUEST_LIMIT_BYTES + 1
    with pytest.raises(FrameTooLarge) as caught:
        messages.encode_request(1, "plan", {"x": "a" * (room + 1)})
    assert caught.value.hint == (
        "send less in one message: name a model by path instead of pasting it, ask for fewer records at once"
    )


def test_long_text_is_cut_with_dots() -> None:
    """At the limit nothing is, one letter more and three dots stand for the rest."""
    limit = codes._TEXT_LIMIT
    for length, sent in ((limit, "x" * limit), (limit + 1, "x" * limit + "...")):
        assert codes.to_object(VeloxError("x" * length, hint="")).message == sent
    assert codes.to_object(VeloxError("a\ud800b", hint="")).message == "a?b"


def config(values: Any) -> tuple[str, str, str | None] | None:
    """What is said of a config, None when it passes."""
    try:
        messages.convert_params("plan", {"model": {"config": values}})
    except InvalidParams as error:
        return said(error)
    return None


def test_the_depth_of_a_config_is_bounded() -> None:
    """The config is level 0: what stands on level 32 passes, in lists as in objects, and level 33 does not."""
    for wrap in (lambda inner: [inner], lambda inner: {"a": inner}):
        value: Any = 1
        for _ in range(MAX_CONFIG_DEPTH - 1):
            value = wrap(value)
        assert config({"a": value}) is None
        assert config({"a": wrap(value)}) == (
            "model.config has more than 32 levels or more than 20000 values",
            CONFIG_HINT,
            "model.config",
        )


def test_the_values_of_a_config_are_counted() -> None:
    """The config itself is the first of 20,001 that are looked at."""
    assert config({"a": [1] * (MAX_CONFIG_ITEMS - 1)}) is None
    assert config({"a": [1] * MAX_CONFIG_ITEMS}) is not None


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1, 1.5, -127, True])
def test_numbers_of_a_config_that_pass(number: Any) -> None:
    """All that a reader of 64 bits gets back."""
    assert config({"a": number}) is None


@pytest.mark.parametrize("number", ["-9223372036854775809", "18446744073709551616", "1e400"])
def test_numbers_of_a_config_that_do_not(number: str) -> None:
    """One beyond either end; a float that is none is no JSON at all."""
    raw = b'{"model": {"config": {"a": %s}}}' % number.encode()
    with pytest.raises((InvalidParams, ParseError)) as caught:
        messages.decode_params("plan", raw)
    if isinstance(caught.value, InvalidParams):
        assert caught.value.hint


def test_a_config_by_hand_with_a_number_that_is_none() -> None:
    """From Python, where JSON does not stand in the way."""
    for number in (float("inf"), float("nan"), 2**64, -(2**63) - 1):
        with pytest.raises(InvalidParams) as caught:
            messages.ModelParams(config={"a": [number]})
        assert said(caught.value) == (
            "model.config holds a number that is not finite or has more than 64 bits",
            CONFIG_HINT,
            "model.config",
        )


@pytest.mark.usefixtures("zone")
def test_times_are_utc_where_they_do_not_say() -> None:
    """2026-11-30T00:00:00Z is 1,796,083,200 s after 1970 (56 years of 365 days, 14 leap days, 333 days)."""
    midnight = (56 * 365 + 14 + 333) * 86_400
    for text, seconds in (
        ("2026-11-30", midnight),
        ("2026-11-30T00:00:00", midnight),
        ("2026-11-30T08:00:00Z", midnight + 8 * 3600),
        ("2026-11-30T08:00:00+02:00", midnight + 6 * 3600),
    ):
        assert RecordsParams(since=text).since_s() == seconds
    assert RecordsParams().since_s() is None


def test_the_plan_of_an_explanation_is_the_one_asked_for() -> None:
    """Its workload and all that goes with it; without a model there is none to make."""
    workload = WorkloadProfile(context_length=123, batch_size=3)
    asked = ExplainParams(
        model=messages.ModelParams(id="o/n"), workload=workload, methods=("fp16",), memory_budget_bytes=7
    )
    plan = asked.plan_params()
    assert (plan.model, plan.workload, plan.methods, plan.memory_budget_bytes) == (
        asked.model,
        workload,
        ("fp16",),
        7,
    )
    with pytest.raises(InvalidParams) as caught:
        ExplainParams(plan_id="p").plan_params()
    assert said(caught.value) == ("explain by plan_id makes no plan", "give model", "model")


def test_a_workload_without_a_context_has_one_token() -> None:
    """The rest is what was said."""
    made = FitWorkload(batch_size=3, allow_eviction=True).profile()
    assert msgspec.structs.replace(made, context_length=4096) == WorkloadProfile(batch_size=3, allow_eviction=True)
    assert made.context_length == 1


def test_a_path_that_leads_nowhere_is_told_of_by_the_object_it_left() -> None:
    """A list holds no fields: what is said is said of the last object on the way."""
    assert known.unknown_field(messages.PlanParams, ["methods", "x"], "modle") == "did you mean model?"


def test_a_question_tells_its_workload() -> None:
    """`plan` as it was asked, `fit` at one token."""
    workload = WorkloadProfile(context_length=77)
    model = messages.ModelParams(id="o/n")
    assert messages.PlanParams(model=model, workload=workload).workload_profile is workload
    assert messages.FitParams(model=model).workload_profile == WorkloadProfile(context_length=1)

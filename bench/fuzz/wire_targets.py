"""What may be sent over the socket, either way, and the planner behind it. Anything but a VeloxError is a find.

Each function takes any bytes. What it lets out, an AssertionError included, is what the fuzzer looks for.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from veloxquant import local, views
from veloxquant.config import Config
from veloxquant.errors import VeloxError
from veloxquant.models import static
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import FitTable, fit
from veloxquant.planner.plan import plan
from veloxquant.planner.result import Plan
from veloxquant.planner.snapshot import NoRecords
from veloxquant.profiles import HardwareProfile
from veloxquant.wire import answers, codes, messages
from veloxquant.wire.frames import FrameSplitter

if TYPE_CHECKING:
    from veloxquant.local import World

LIMIT = 64
"""A short line limit, so that inputs of a fuzzer's size go beyond it."""
CALLS = tuple(sorted(messages.PARAMS))
RESULTS = (
    Plan,
    FitTable,
    HardwareProfile,
    answers.Hello,
    answers.Explanation,
    answers.MethodList,
    answers.RecordPage,
    answers.Status,
    answers.Reloaded,
    answers.Subscribed,
    answers.Notice,
)


def frames(data: bytes) -> None:
    """Pieces of any size give the lines that one piece gives, and no line beyond the limit."""
    size = 1 + (data[0] if data else 0) % 9
    stream = data[1 : 1 + 8 * LIMIT]  # more would only be slow
    whole, pieces = FrameSplitter(LIMIT), FrameSplitter(LIMIT)
    expected = whole.feed(stream)
    found = [line for at in range(0, len(stream), size) for line in pieces.feed(stream[at : at + size])]
    assert found == expected
    assert (pieces.overflowed, pieces.pending_bytes) == (whole.overflowed, whole.pending_bytes)
    lines = stream.split(b"\n")
    assert found == lines[: len(found)]
    assert whole.overflowed == any(len(line) > LIMIT for line in lines)
    assert whole.overflowed or whole.pending_bytes == len(lines[-1])


def request(data: bytes) -> None:
    """A line is a request or a typed error, and the error can be written and read back."""
    try:
        found = messages.decode_request(data)
    except VeloxError as error:
        _travels(error, messages.salvage_id(data))
    else:
        assert messages.salvage_id(data) == found.id
        again = messages.decode_params(found.method, msgspec.json.encode(found.params))
        assert again == found.params


def params(data: bytes) -> None:
    """The params of every call: the first byte says which."""
    method = CALLS[(data[0] if data else 0) % len(CALLS)]
    try:
        found = messages.decode_params(method, data[1:])
        plain = msgspec.to_builtins(found)
        assert messages.convert_params(method, plain) == found
        if isinstance(found, messages.HardwareParams):
            msgspec.json.encode(views.hardware(found, world()))
    except VeloxError as error:
        _travels(error, 1)


def answer(data: bytes) -> None:
    """What a client makes of any line of a daemon: the first byte says which result it waits for."""
    kind = RESULTS[(data[0] if data else 0) % len(RESULTS)]
    try:
        found = messages.decode_answer(data[1:])
        if isinstance(found.error, codes.ErrorObject):
            _travels(codes.from_object(found.error), 1)
        raw = found.result if isinstance(found.result, msgspec.Raw) else found.params
        if isinstance(raw, msgspec.Raw):
            messages.decode_result(raw, kind)
    except VeloxError as error:
        _travels(error, 1)


def planning(data: bytes) -> None:
    """Params of `plan` through the planner and back, without a trace: the model is read from its config."""
    try:
        asked = messages.decode_params("plan", data)
        assert isinstance(asked, messages.PlanParams)
        if asked.model.config is None:
            return
        profile = static.read(local.model_source(asked))
        made = plan(local.request(asked, profile, world()), world().snapshot)
        encoded = msgspec.json.encode(made)
        json.loads(encoded, parse_constant=_refuse)
        explain(messages.decode_result(encoded, Plan), None)
        if len(data) % 8 == 0:  # a table of lengths takes as long as a dozen plans
            wanted = messages.FitParams(model=asked.model, hardware=asked.hardware)
            msgspec.json.encode(fit(local.request(wanted, profile, world()), world().snapshot))
    except VeloxError as error:
        _travels(error, 1)


@cache
def world() -> World:
    """The methods and the machine, without records."""
    return local.open_world(Config(), records=NoRecords(), calibrations={})


def _travels(error: VeloxError, request_id: int | str | None) -> None:
    """An error becomes one line, and the line the same kind of error."""
    line = messages.encode_error(request_id, error)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    back = messages.decode_answer(line)
    assert isinstance(back.error, codes.ErrorObject)
    assert back.id == request_id
    assert codes.from_object(back.error).name == error.name


def _refuse(word: str) -> None:
    raise AssertionError(f"an answer holds {word}, which is no JSON")

"""Plans over the socket: right, remembered byte for byte, never stale, and never in the way of others."""

from __future__ import annotations

import json
import os
import select
from typing import TYPE_CHECKING, Any

import pytest
from daemon_kit import TINY_BYTES_PER_TOKEN, TINY_LLAMA, Daemon, Wire

from veloxquant import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TINY = {"model": {"config": TINY_LLAMA, "model_id": "tiny"}}

FIXED = {"total_memory_bytes": 16 * 2**30, "working_set_bytes": 12 * 2**30, "active_bytes": 0}
"""Memory that does not move between two questions."""


@pytest.fixture
def wire(shared: Daemon) -> Iterator[Wire]:
    """A connection to the module's daemon."""
    wire = Wire(shared.socket)
    yield wire
    wire.close()


def question(params: dict[str, Any], *, indent: int | None = None) -> bytes:
    """One plan request."""
    return json.dumps({"jsonrpc": "2.0", "id": 5, "method": "plan", "params": params}, indent=indent).encode()


def raw(wire: Wire, line: bytes) -> bytes:
    """The answer's bytes."""
    wire.send(line + b"\n")
    return wire.line()


def in_one_world(wire: Wire, act: Callable[[], Any]) -> Any:
    """What `act` gives while the generation stands still; memory of a busy machine may move it, then it acts again."""
    while True:
        before = wire.call("ping")["generation"]
        found = act()
        if wire.call("ping")["generation"] == before:
            return found


def bytes_per_token(plan: dict[str, Any]) -> float:
    """Of the chosen candidate."""
    found: float = plan["chosen"]["memory"]["bytes_per_token"]
    return found


def model_folder(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write (again) a model folder; the params that name it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
    return {"model": {"path": str(folder)}}


def test_a_plan_is_made_from_a_trace(wire: Wire) -> None:
    """Arithmetic: 2 layers x 2 heads x (64 + 64) x 2 bytes; 4,096 + 512 tokens are 18 steps of 256 slots."""
    plan = wire.call("plan", TINY | {"workload": {"context_length": 4096, "generation_length": 512}})
    assert (plan["schema"], plan["source"], plan["decision"]) == ("veloxquant.plan/1", "daemon", "keep_fp16")
    assert plan["model"]["source"] == "traced"
    assert bytes_per_token(plan) == TINY_BYTES_PER_TOKEN
    assert plan["chosen"]["memory"]["stored_bytes"] == 4608 * TINY_BYTES_PER_TOKEN
    assert wire.call("status")["process"]["engine_modules"] == []


def test_the_same_question_gets_the_same_bytes(wire: Wire) -> None:
    """From memory, which the status counts; written in another way, the answer is equal."""

    def ask_often() -> tuple[set[bytes], int, dict[str, Any]]:
        answers = {raw(wire, question(TINY))}
        hits = wire.call("status")["cache"]["hits"]
        answers |= {raw(wire, question(TINY)) for _ in range(3)}
        gained = wire.call("status")["cache"]["hits"] - hits
        return answers, gained, wire.ask(question(TINY, indent=1).replace(b"\n", b" "))

    answers, gained, other = in_one_world(wire, ask_often)
    assert (len(answers), gained) == (1, 3)
    assert other == json.loads(answers.pop())


def test_a_remembered_plan_is_explained(wire: Wire) -> None:
    """By its id, or by the params that make it; for the chosen variant or another."""
    asked = TINY | {"hardware": FIXED}
    plan = wire.call("plan", asked)
    by_id = wire.call("explain", {"plan_id": plan["plan_id"]})
    assert by_id["plan_id"] == plan["plan_id"]
    assert any("1,024 bytes" in line for line in by_id["lines"])
    assert wire.call("explain", asked)["lines"] == by_id["lines"]
    other = wire.call("explain", asked | {"label": "affine4-g64"})
    assert other["label"] == "affine4-g64"
    assert other["lines"] != by_id["lines"]


def test_fit_gives_contexts(wire: Wire) -> None:
    """For each variant at 1, 2, 4 and 8 slots, falling with the slots; packed ones need room for a block in prefill."""
    fit = wire.call("fit", {"model": TINY["model"], "memory_budget_bytes": 192 * 2**20})
    rows = {row["label"]: [cell["max_context_tokens"] for cell in row["cells"]] for row in fit["rows"]}
    assert rows["fp16"] == sorted(rows["fp16"], reverse=True)
    assert rows["affine4-g64"][0] > rows["fp16"][0] > 0


def test_as_if_on_another_machine(wire: Wire) -> None:
    """The overrides are in the answer; this machine's facts are not touched."""
    mac = {
        "hardware": {
            "chip": "Apple M2",
            "gpu_cores": 10,
            "total_memory_bytes": 16 * 2**30,
            "working_set_bytes": 12 * 2**30,
        }
    }
    plan = wire.call("plan", TINY | mac)
    assert (plan["hardware"]["chip"], plan["budget"]["working_set_bytes"]) == ("Apple M2", 12 * 2**30)
    assert wire.call("hardware")["chip"] != "Apple M2"


def test_a_changed_folder_is_never_answered_from_memory(wire: Wire, short_folder: Path) -> None:
    """Twice the heads are twice the bytes, although the question is the same to the byte."""
    params = model_folder(short_folder / "m")
    assert bytes_per_token(wire.call("plan", params)) == TINY_BYTES_PER_TOKEN
    model_folder(short_folder / "m", num_key_value_heads=4)
    assert bytes_per_token(wire.call("plan", params)) == 2 * TINY_BYTES_PER_TOKEN
    (short_folder / "m" / "config.json").unlink()
    with pytest.raises(errors.ModelConfigInvalid):
        wire.call("plan", params)


def test_a_link_that_points_elsewhere_is_another_model(wire: Wire, short_folder: Path) -> None:
    """As "current" links do."""
    model_folder(short_folder / "one")
    model_folder(short_folder / "two", num_key_value_heads=4)
    link = short_folder / "current"
    link.symlink_to(short_folder / "one")
    params = {"model": {"path": str(link)}}
    assert bytes_per_token(wire.call("plan", params)) == TINY_BYTES_PER_TOKEN
    link.unlink()
    link.symlink_to(short_folder / "two")
    assert bytes_per_token(wire.call("plan", params)) == 2 * TINY_BYTES_PER_TOKEN


def test_no_room_for_the_cache_stops_no_plan(start: Callable[..., Daemon], short_folder: Path) -> None:
    """The trace is used from memory; the second question needs no second worker."""
    (short_folder / "file").write_text("")
    daemon = start(env={"VELOXQUANT_TRACE_CACHE_DIRECTORY": str(short_folder / "file" / "traces")}).ready()
    assert bytes_per_token(daemon.call("plan", TINY)) == TINY_BYTES_PER_TOKEN
    plan = daemon.call("plan", TINY | {"workload": {"context_length": 100}})
    (said,) = [note["text"] for note in plan["warnings"] if note["code"] == "trace_not_kept"]
    status = daemon.call("status")
    assert status["traces"]["done"] == 1
    (warning,) = status["warnings"]
    assert str(short_folder / "file" / "traces") in warning
    assert "trace.cache_directory" in warning
    assert (said, [one["text"] for one in daemon.events("trace.not_kept")]) == (warning, [warning])


def test_without_an_engine_the_answer_says_so(start: Callable[..., Daemon], short_folder: Path) -> None:
    """The static reader's figures at lower confidence; a family it does not know, or the engine by name, is refused."""
    hide = "import importlib.metadata as m; v = m.version; "
    hide += "m.version = lambda n: (_ for _ in ()).throw(m.PackageNotFoundError(n)) if n == 'mlx-lm' else v(n)"
    (short_folder / "sitecustomize.py").write_text(hide)
    search = os.pathsep.join(filter(None, [str(short_folder), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": search, "VELOXQUANT_TRACE_CACHE_DIRECTORY": str(short_folder / "traces")}
    wire = start(env=env).ready().connect()
    tiny = {"model": TINY["model"] | {"weights_bytes": 2**20}}
    plan = wire.call("plan", tiny)
    assert (plan["model"]["source"], bytes_per_token(plan)) == ("static", TINY_BYTES_PER_TOKEN)
    assert plan["chosen"]["memory"]["evidence"]["confidence"] < 1
    with pytest.raises(errors.EngineUnavailable) as caught:
        wire.call("plan", tiny | {"engine": {"name": "mlx-lm"}})
    assert "pip install" in caught.value.hint
    with pytest.raises(errors.EngineUnavailable):
        wire.call("plan", {"model": {"config": {"model_type": "zork"}}})


def test_a_trace_is_in_nobodys_way_and_made_once(shared: Daemon) -> None:
    """Four clients ask for a model not seen yet; a fifth is answered meanwhile; one worker runs."""
    params = {"model": {"config": TINY_LLAMA | {"num_hidden_layers": 3}, "model_id": "three layers"}}
    waiting = [Wire(shared.socket) for _ in range(4)]
    for wire in waiting:
        wire.send(question(params) + b"\n")
    other = Wire(shared.socket)
    assert other.call("ping")["pong"]
    assert select.select([wire.socket for wire in waiting], [], [], 0)[0] == []
    answers = {wire.line() for wire in waiting}
    assert len(answers) == 1
    assert bytes_per_token(json.loads(answers.pop())["result"]) == 1.5 * TINY_BYTES_PER_TOKEN
    assert sum(event["model"] == "three layers" for event in shared.events("trace.started")) == 1
    for wire in (*waiting, other):
        wire.close()


def test_a_client_that_leaves_during_a_trace_takes_it_from_nobody(shared: Daemon) -> None:
    """The one that stays gets its answer."""
    params = {"model": {"config": TINY_LLAMA | {"num_hidden_layers": 5}, "model_id": "five layers"}}
    leaving, staying = Wire(shared.socket), Wire(shared.socket)
    leaving.send(question(params) + b"\n")
    staying.send(question(params) + b"\n")
    assert shared.call("ping")["pong"]
    leaving.close()
    assert bytes_per_token(json.loads(staying.line())["result"]) == 2.5 * TINY_BYTES_PER_TOKEN
    staying.close()

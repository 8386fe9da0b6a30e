"""The client's calls, answered by the transport that is shipped for users' tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from scripted import NO_FIT as PLAN

import veloxquant as vq
from veloxquant import errors
from veloxquant.client import Client, FakeTransport
from veloxquant.errors import (
    InvalidParams,
    MethodNotFound,
    ModelNotFound,
    NotAnswering,
    NotRunning,
    Overloaded,
    ProtocolUnsupported,
    ShuttingDown,
    UnknownMethod,
    VeloxError,
)
from veloxquant.paths import socket_path
from veloxquant.planner.fit import FitTable
from veloxquant.profiles import HardwareProfile, WorkloadProfile
from veloxquant.wire import answers, codes

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan

CONFIG = {"model_type": "llama", "id": "an id that a config may well have"}


def asked(**given: Any) -> dict[str, Any]:
    """The params that `plan` sends for these arguments."""
    transport = FakeTransport({"plan": PLAN})
    Client(transport=transport, fallback=False).plan(**given)
    return transport.calls[0][1]


def test_a_wrong_configuration_keeps_nobody_from_a_daemon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon is asked where it is by default, with a warning; planning in this process is refused by the key."""
    monkeypatch.setenv("VELOXQUANT_DAEMON_DRAIN_S", "soon")
    client = Client()
    assert client.socket == socket_path()
    assert "daemon.drain_s" in caplog.text
    with pytest.raises(errors.ConfigInvalid) as caught:
        client.plan(CONFIG)
    assert caught.value.field == "daemon.drain_s"


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("org/name", {"id": "org/name"}),
        ("mlx-community/Llama-3.1-8B-4bit", {"id": "mlx-community/Llama-3.1-8B-4bit"}),
        ("/models/x", {"path": "/models/x"}),
        (Path("/models/x"), {"path": "/models/x"}),
        ("name", {"path": str(Path("name").absolute())}),
        ("./org/name", {"path": str(Path("org/name").absolute())}),
        ("a/b/c", {"path": str(Path("a/b/c").absolute())}),
        ({"path": "/models/x"}, {"path": "/models/x"}),
        ({"path": Path("y")}, {"path": str(Path("y").absolute())}),
        ({"id": "org/name"}, {"id": "org/name"}),
        (CONFIG, {"config": CONFIG}),
        ({"config": CONFIG, "weights_bytes": 5}, {"config": CONFIG, "weights_bytes": 5}),
    ],
)
def test_ways_to_name_a_model(model: Any, sent: dict[str, Any]) -> None:
    """A folder, an id, a config, or the protocol's own mapping; paths become absolute."""
    assert asked(model=model)["model"] == sent


def test_an_existing_folder_wins_over_an_id(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """org/name that is a folder here is that folder."""
    (short_folder / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(short_folder)
    assert asked(model="org/name")["model"] == {"path": str(Path.cwd() / "org" / "name")}


@pytest.mark.parametrize("model", ["", None, 5])
def test_what_names_no_model_is_refused(model: Any) -> None:
    """Refused here, naming the field."""
    with pytest.raises(InvalidParams) as caught:
        asked(model=model)
    assert caught.value.field == "model"


def test_workloads_in_three_ways() -> None:
    """A WorkloadProfile, a mapping, single fields by name, and fields over either."""
    expected = {"context_length": 32768, "objective": "memory"}
    assert asked(model="a/b", workload=expected)["workload"] == expected
    assert asked(model="a/b", **expected)["workload"] == expected
    profile = vq.WorkloadProfile(context_length=32768)
    sent = asked(model="a/b", workload=profile, objective="memory")["workload"]
    assert msgspec.convert(sent, vq.WorkloadProfile) == vq.WorkloadProfile(**expected)


def test_the_other_params() -> None:
    """What is given travels under the protocol's names; a single method may be text."""
    sent = asked(
        model="a/b",
        hardware={"chip": "Apple M2"},
        engine={"name": "mlx-lm"},
        memory_budget_bytes=5,
        methods="affine",
    )
    assert {k: v for k, v in sent.items() if k not in ("model", "workload")} == {
        "hardware": {"chip": "Apple M2"},
        "engine": {"name": "mlx-lm"},
        "memory_budget_bytes": 5,
        "methods": ["affine"],
    }


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_kl": float("nan")}, "workload.max_kl"),
        ({"hardware": {"bandwidth_gbps": float("inf")}}, "hardware.bandwidth_gbps"),
        ({"workload": {"objective": "speed"}}, "workload.objective"),
        ({"contxt_length": 5}, "workload.contxt_length"),
        ({"workload": {"context_length": 10**9}}, "workload.context_length"),
        ({"hardware": {"chipp": "M2"}}, "hardware.chipp"),
        ({"methods": []}, "methods"),
        ({"memory_budget_bytes": -1}, "memory_budget_bytes"),
    ],
)
def test_wrong_params_name_their_field(given: dict[str, Any], field: str) -> None:
    """Whether the client or the daemon sees it first: the field is the protocol's path."""
    with pytest.raises(InvalidParams) as caught:
        asked(model="a/b", **given)
    assert caught.value.field == field


def test_each_typed_error_comes_back_as_itself() -> None:
    """Every error that a daemon can answer with is raised as its own class, with message, hint and field."""
    for kind in codes.BY_NAME.values():
        if issubclass(kind, (NotRunning, NotAnswering, Overloaded, ShuttingDown, UnknownMethod, ProtocolUnsupported)):
            continue  # those mean "no answer": see the fallback
        transport = FakeTransport({"plan": kind("what and why", hint="what next", field="a.b")})
        with pytest.raises(kind) as caught:
            Client(transport=transport).plan("a/b")
        assert type(caught.value) is kind
        assert (caught.value.message, caught.value.hint, caught.value.field) == ("what and why", "what next", "a.b")


def test_an_error_of_a_newer_daemon_keeps_its_text() -> None:
    """An unknown name is still a VeloxError with what was said."""

    class FromTheFuture(VeloxError):
        name = "from_the_future"

    with pytest.raises(VeloxError, match="new trouble"):
        Client(transport=FakeTransport({"plan": FromTheFuture("new trouble")})).plan("a/b")


def test_r20_unknown_fields_in_answers_are_ignored() -> None:
    """A newer daemon may add fields."""
    plain = {**msgspec.to_builtins(PLAN), "new": 1, "budget": {**msgspec.to_builtins(PLAN.budget), "newer": [2]}}
    assert Client(transport=FakeTransport({"plan": plain}), fallback=False).plan("a/b") == PLAN


def test_another_schema_is_another_protocol() -> None:
    """A plan of a schema that this client does not know is not guessed at."""
    plain = {**msgspec.to_builtins(PLAN), "schema": "veloxquant.plan/2"}
    with pytest.raises(ProtocolUnsupported, match="plan/2"):
        Client(transport=FakeTransport({"plan": plain}), fallback=False).plan("a/b")


def test_r20_hello_agrees_on_the_protocol() -> None:
    """The answer says who it is; a version that we do not speak is refused."""
    hello = answers.Hello(server="veloxquant", version="9", protocol=1, capabilities=("plan",), pid=7, generation=3)
    transport = FakeTransport({"hello": hello})
    assert Client(transport=transport).hello(["plan"]).pid == 7
    sent = transport.calls[0][1]
    assert (sent.get("protocol", [1]), sent["want"]) == ([1], ["plan"])
    transport.answers["hello"] = msgspec.structs.replace(hello, protocol=2)
    with pytest.raises(ProtocolUnsupported, match="protocol 2"):
        Client(transport=transport).hello()


def test_the_calls_about_the_daemon() -> None:
    """ping, reload and shutdown are typed and never answered by this process."""
    transport = FakeTransport(
        {
            "ping": {"pong": True, "pid": 7, "generation": 1},
            "reload": {"generation": 2, "changed": True},
            "shutdown": {"stopping": True, "drain_s": 2.0},
        }
    )
    with Client(transport=transport) as client:
        assert (client.ping().pid, client.reload().generation, client.shutdown().drain_s) == (7, 2, 2.0)
        with pytest.raises(NotRunning):
            client.status()
    assert [name for name, _ in transport.calls] == ["ping", "reload", "shutdown", "status"]


def test_a_remembered_plan_is_explained_by_the_daemon() -> None:
    """An id asks the daemon, a plan in hand needs nobody."""
    transport = FakeTransport({"explain": answers.Explanation(plan_id="0a", label=None, lines=("a", "b"))})
    client = Client(transport=transport, fallback=False)
    assert client.explain("0a") == ("a", "b")
    assert client.explain(PLAN)[0].split()[:2] == ["decision", "no_fit"]
    assert len(transport.calls) == 1


def test_a_table_of_fits_asks_for_no_context() -> None:
    """It is what is looked for, however the workload is named; a schema of tomorrow is not guessed at."""
    table = FitTable(
        generation=1,
        source="daemon",
        rows=(),
        rejected=(),
        hardware={},
        model={},
        workload={},
        engine={},
        budget=PLAN.budget,
    )
    transport = FakeTransport({"fit": table})
    client = Client(transport=transport, fallback=False)
    assert client.fit("a/b", WorkloadProfile(context_length=4096, generation_length=7)) == table
    assert client.fit("a/b", generation_length=7) == table
    for _, sent in transport.calls:
        assert (sent["model"], sent["workload"]["generation_length"]) == ({"id": "a/b"}, 7)
        assert "context_length" not in sent["workload"]
    transport.answers["fit"] = {**msgspec.to_builtins(table), "schema": "veloxquant.fit/2"}
    with pytest.raises(ProtocolUnsupported, match="fit/2"):
        client.fit("a/b")


def test_the_calls_about_the_machine() -> None:
    """The machine as it is, or as it would be; the daemon's numbers as text."""
    mac = HardwareProfile(chip="Apple M2", total_memory_bytes=16 * 2**30)
    transport = FakeTransport(
        {"hardware": mac, "metrics": {"content_type": "text/plain; version=0.0.4", "text": "up 1\n"}}
    )
    client = Client(transport=transport, fallback=False)
    assert client.hardware() == client.hardware({"total_memory_bytes": 2**35}) == mac
    assert client.metrics().text == "up 1\n"
    assert [sent for _, sent in transport.calls] == [{}, {"hardware": {"total_memory_bytes": 2**35}}, {}]


def test_no_time_left_is_no_time_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's silence is the answer then, and nothing is begun here."""
    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(NotAnswering, match="asleep"):
        Client(transport=FakeTransport({"plan": NotAnswering("asleep")})).plan("a/b", timeout_s=0)


def test_subscribing_to_the_fake() -> None:
    """Users can test what they do with notices."""
    notices = [{"event": "state", "generation": 1, "full": True}, {"event": "changed", "generation": 2}]
    client = Client(transport=FakeTransport(notices=notices))
    assert [(one.event, one.generation) for one in client.subscribe()] == [("state", 1), ("changed", 2)]


def test_the_fake_takes_functions_and_checks_params() -> None:
    """A function sees the params; params that a daemon would refuse are refused here, too."""
    transport = FakeTransport({"methods": lambda params: MethodNotFound(f"no {params['name']}")})
    with pytest.raises(MethodNotFound, match="no foo"):
        Client(transport=transport).methods("foo")
    with pytest.raises(InvalidParams):
        Client(transport=transport, fallback=False).records(limit=0)


@pytest.mark.parametrize("error", [NotRunning("gone"), NotAnswering("hung"), Overloaded("full"), ShuttingDown("bye")])
def test_no_answer_falls_back_to_this_process(error: VeloxError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone, hung, full or stopping: the plan is made here, marked so, and the reason is kept."""
    local = msgspec.structs.replace(PLAN, source="local")
    given: list[tuple[str, Any]] = []

    def answer(_self: Any, method: str, params: Any, left_s: float) -> Plan:
        given.append((method, params))
        assert 0 < left_s <= 5
        return local

    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", answer)
    client = Client(transport=FakeTransport({"plan": error}), timeout_s=5)
    assert client.plan("a/b").source == "local"
    assert given == [("plan", {"model": {"id": "a/b"}, "workload": {}})]
    assert client.fallback_reason is not None
    assert client.fallback_reason.message == error.message
    with pytest.raises(type(error)):
        Client(transport=FakeTransport({"plan": error}), fallback=False).plan("a/b")


def test_an_answer_that_does_not_decode_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that answers nonsense is as good as none."""
    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", lambda *_args: PLAN)
    assert Client(transport=FakeTransport({"plan": {"decision": 5}})).plan("a/b") == PLAN


def test_wrong_input_is_not_tried_again_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the input is the answer; this process would say the same."""
    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", lambda *_args: pytest.fail("was asked"))
    with pytest.raises(ModelNotFound):
        Client(transport=FakeTransport({"plan": ModelNotFound("nowhere")})).plan("a/b")


def test_public_door() -> None:
    """The package's names are the client's own."""
    assert vq.Client is Client
    assert issubclass(errors.NotRunning, vq.VeloxError)


def test_importing_the_client_is_light() -> None:
    """No mlx, planner loop, asyncio, psutil or model library comes with the client."""
    code = (
        "import sys, veloxquant.client\n"
        "print([m for m in ('mlx','mlx_lm','asyncio','psutil','pluggy','watchdog','veloxquant.local',"
        "'veloxquant.planner.plan') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), 10**400, "5"])
def test_a_time_limit_is_a_finite_time(timeout_s: Any) -> None:
    """Anything else is refused by name before anybody is asked."""
    with pytest.raises(InvalidParams) as caught:
        Client(timeout_s=timeout_s)
    assert caught.value.field == "timeout_s"

"""Each command: what it asks the daemon, what it prints, how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant import __version__, paths
from veloxquant.client import Client
from veloxquant.ctl import question, wait
from veloxquant.errors import NotAnswering
from veloxquant.profiles import OBJECTIVES
from veloxquant.wire import answers

if TYPE_CHECKING:
    from types import SimpleNamespace

    from veloxquant.client import FakeTransport

Run = Callable[..., Any]
CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def config_file(short_folder: Path) -> str:
    """A model's config without weights."""
    place = short_folder / "Tiny-Llama.json"
    place.write_text(json.dumps(CONFIG))
    return str(place)


def test_every_flag_of_plan_reaches_the_daemon(
    ctl: Run, fake: FakeTransport, example: SimpleNamespace, config_file: str
) -> None:
    """Each flag becomes its field of the protocol, with units resolved: GiB is 2**30, GB 1e9, k 1024."""
    fake.answers["plan"] = example.plan
    flags = (
        "--weights 4.5GiB --context 128k --generate 256 --batch 2 --slots 4 --objective memory --max-kl 0.05 "
        "--max-latency 80 --budget 12GB --allow-eviction --prefill-step 512 --method affine fp16 --gpu-cores 10 "
        "--memory 16GiB --working-set 11.5GiB --active 512MiB --bandwidth 100 --engine-version 0.32.2"
    )
    done = ctl("plan", "--config", config_file, "--chip", "Apple M2", *flags.split())
    assert (done.code, done.err) == (0, "")
    assert fake.calls == [
        (
            "plan",
            {
                "model": {"config": CONFIG, "model_id": "Tiny-Llama", "weights_bytes": 4_831_838_208},
                "workload": {
                    "context_length": 131_072,
                    "generation_length": 256,
                    "batch_size": 2,
                    "num_concurrent_requests": 4,
                    "objective": "memory",
                    "max_kl": 0.05,
                    "max_latency_ms": 80.0,
                    "prefill_step_size": 512,
                    "allow_eviction": True,
                },
                "hardware": {
                    "chip": "Apple M2",
                    "gpu_cores": 10,
                    "total_memory_bytes": 17_179_869_184,
                    "working_set_bytes": 12_348_030_976,
                    "active_bytes": 536_870_912,
                    "bandwidth_gbps": 100.0,
                },
                "engine": {"name": "mlx-lm", "version": "0.32.2"},
                "memory_budget_bytes": 12_000_000_000,
                "methods": ["affine", "fp16"],
            },
        )
    ]


def test_what_is_not_said_is_not_sent(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """Defaults are the daemon's; a relative model folder becomes absolute, an id stays an id."""
    fake.answers["plan"] = example.plan
    ctl("plan", "--model", "org/name")
    ctl("plan", "--model", "./folder")
    assert fake.calls[0] == ("plan", {"model": {"id": "org/name"}, "workload": {}})
    assert fake.calls[1][1]["model"] == {"path": str(Path("folder").absolute())}


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--context", "-5"), "--context"),
        (("--context", "1.5"), "--context"),
        (("--context", "many"), "--context"),
        (("--working-set", "12 parsecs"), "--working-set"),
        (("--budget", "1e99GiB"), "--budget"),
        (("--max-kl", "small"), "--max-kl"),
        (("--max-kl", "nan"), "workload.max_kl"),
        (("--context", "1000000000"), "workload.context_length"),
        (("--context", "0"), "workload.context_length"),
        (("--bandwidth", "inf"), "hardware.bandwidth_gbps"),
    ],
)
def test_a_wrong_value_names_its_flag_or_field(
    ctl: Run, fake: FakeTransport, flags: tuple[str, str], field: str
) -> None:
    """Wrong numbers are refused with the flag, or with the protocol's field when only the protocol can tell."""
    done = ctl("plan", "--model", "org/name", "--json", *flags)
    assert done.code == 2
    shown = json.loads(done.out)["error"]
    assert (shown["name"], shown["field"]) == ("invalid_params", field)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "invalid_params"),
        (("--model", "a/b", "--config", "x.json"), "invalid_params"),
        (("--model", "a/b", "--weights", "1GiB"), "invalid_params"),
        (("--config", "/nowhere/config.json"), "model_not_found"),
    ],
)
def test_a_model_is_named_in_one_way(ctl: Run, words: tuple[str, ...], name: str) -> None:
    """One of --model and --config, and a config file that is there."""
    done = ctl("plan", "--json", *words)
    assert done.code == 2
    assert json.loads(done.out)["error"]["name"] == name


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff", "nul", '"text"'])
def test_a_config_file_that_is_no_config(ctl: Run, short_folder: Path, text: str) -> None:
    """What is not one JSON object is refused by name, with the file."""
    place = short_folder / "config.json"
    place.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = ctl("plan", "--json", "--config", str(place))
    shown = json.loads(done.out)["error"]
    assert (done.code, shown["name"], shown["field"]) == (2, "model_config_invalid", "--config")
    assert str(place) in shown["message"]


def test_a_pipe_is_no_config_file(ctl: Run, short_folder: Path) -> None:
    """Nobody writes to it, and no time limit would end the wait: it is refused unread, and so is a folder."""
    os.mkfifo(short_folder / "pipe")
    for place in (short_folder / "pipe", short_folder):
        done = ctl("plan", "--json", "--config", str(place))
        shown = json.loads(done.out)["error"]
        assert (done.code, shown["name"], shown["field"]) == (2, "model_not_found", "--config")


def test_a_plan_that_is_a_no_ends_with_1(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """Scripts can branch on whether anything fits."""
    fake.answers["plan"] = example.no_fit
    done = ctl("plan", "--model", "a/b")
    assert done.code == 1
    assert done.out.startswith("nothing fits")


def test_plan_as_json_is_the_daemons_answer(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """--json gives the protocol's own object with its schema."""
    fake.answers["plan"] = example.plan
    shown = json.loads(ctl("plan", "--model", "a/b", "--json").out)
    assert shown["schema"] == "veloxquant.plan/1"
    assert shown["plan_id"] == "0123456789abcdef"
    assert shown["chosen"]["memory"]["stored_bytes"] == 36_864 * 131_584


def test_the_last_plan_can_be_explained(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """`explain --last` speaks of the very plan that was shown, without a daemon; a variant can be named."""
    fake.answers["plan"] = example.plan
    assert ctl("explain", "--last").code == 1  # nothing kept yet
    ctl("plan", "--model", "a/b")
    asked = len(fake.calls)
    assert "affine4-g64" in ctl("explain", "--last").out
    one = json.loads(ctl("explain", "affine4-g32", "--last", "--json").out)
    assert (one["schema"], one["label"]) == ("veloxquant.explain/1", "affine4-g32")
    assert one["lines"]
    unknown = ctl("explain", "affine9", "--last")
    assert unknown.code == 2
    assert "affine4-g64" in unknown.err
    assert len(fake.calls) == asked


def test_explain_wants_to_know_what(ctl: Run) -> None:
    """Neither a plan nor a model is wrong usage."""
    assert ctl("explain").code == 2


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--last", "--model", "a/b"), "--model"),
        (("--last", "--context", "64k"), "--context"),
        (("--plan-id", "5f0c2a77", "--allow-eviction"), "--allow-eviction"),
        (("--plan-id", "5f0c2a77", "--working-set", "11GiB"), "--working-set"),
        (("--last", "--plan-id", "5f0c2a77"), "--plan-id"),
    ],
)
def test_a_plan_that_was_made_takes_no_other_question(ctl: Run, words: tuple[str, ...], flag: str) -> None:
    """A flag that could change nothing is refused by name, not ignored."""
    done = ctl("explain", *words, "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["name"], error["field"]) == (2, "invalid_params", flag)


def test_a_remembered_plan_is_explained_by_the_daemon(ctl: Run, fake: FakeTransport) -> None:
    """`--plan-id` asks the daemon that remembers it."""
    fake.answers["explain"] = answers.Explanation(plan_id="0a", label=None, lines=("decision   keep",))
    assert ctl("explain", "--plan-id", "0a").out == "decision   keep\n"
    assert fake.calls == [("explain", {"plan_id": "0a"})]


def test_fit_asks_without_a_context(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """`fit` has no --context: the context is its answer."""
    fake.answers["fit"] = example.fit
    done = ctl("fit", "--model", "a/b", "--json")
    assert json.loads(done.out)["schema"] == "veloxquant.fit/1"
    assert done.code == 0
    assert ctl("fit", "--model", "a/b", "--context", "5").code == 2


def test_methods_lists_and_shows(ctl: Run, fake: FakeTransport) -> None:
    """The list has a row for each, the fenced ones with their reason; one can be shown."""
    ready = answers.MethodRow(name="fp16", state="ready", variants=({"label": "fp16", "params": {}},), summary="own")
    fenced = answers.MethodRow(name="foo", state="quarantined", source="veloxquant-foo", reason="import failed")
    fake.answers["methods"] = lambda params: answers.MethodList(
        generation=1, methods=(fenced,) if params else (ready, fenced)
    )
    listed = ctl("methods").out.splitlines()
    assert [line.split() for line in listed[:2]] == [
        ["NAME", "VARIANTS", "SOURCE", "STATE", "NOTE"],
        ["fp16", "1", "-", "ready", "own"],
    ]
    assert "quarantined" in listed[2]
    assert "import failed" in ctl("methods", "show", "foo").out
    assert ctl("methods", "show").code == 2
    assert ctl("methods", "list", "foo").code == 2
    assert json.loads(ctl("methods", "--json").out)["schema"] == "veloxquant.methods/1"


@pytest.mark.parametrize("command", ["records", "plan"])
def test_a_records_folder_that_is_not_there_is_refused(ctl: Run, command: str, short_folder: Path) -> None:
    """A misspelt folder is not a benchmark directory without records."""
    words = ("--model", "a/b") if command == "plan" else ()
    done = ctl(command, *words, "--records", str(short_folder / "none"), "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["name"], error["field"]) == (2, "invalid_params", "--records")


def test_quiet_hushes_what_rooms_below_warn_of(
    ctl: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, short_folder: Path
) -> None:
    """Unreadable records are a note: said, and with --quiet not said; the process is left as it was."""
    (short_folder / "file").touch()
    (short_folder / "config.json").write_text("{}")
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(short_folder / "file"))
    plan = ("plan", "--no-daemon", "--model", str(short_folder))
    ctl(*plan, "--quiet")
    assert caplog.text == ""
    ctl(*plan)
    assert "planning without records" in caplog.text


def test_records_passes_its_filters(ctl: Run, fake: FakeTransport) -> None:
    """Filters are the protocol's."""
    page = answers.RecordPage(generation=1, directory="/r", total=0, offset=0, records=(), skipped_total=0)
    fake.answers["records"] = page
    done = ctl("records", "list", "--method", "fp16", "--model", "m", "--skipped", "--limit", "5", "--offset", "1k")
    assert done.out == "0 used, 0 skipped in /r\n"
    expected = {"method": "fp16", "model_id": "m", "skipped": True, "limit": 5, "offset": 1024}
    assert fake.calls == [("records", expected)]
    assert json.loads(ctl("records", "--json").out)["schema"] == "veloxquant.records/1"


def test_hardware_passes_its_overrides(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """`--chip` asks for another machine."""
    fake.answers["hardware"] = example.hardware
    assert json.loads(ctl("hardware", "--json").out)["chip"] == "Apple M2"
    ctl("hardware", "--chip", "Apple M4 Max", "--gpu-cores", "40")
    assert fake.calls[1] == ("hardware", {"hardware": {"chip": "Apple M4 Max", "gpu_cores": 40}})


def test_status_and_reload(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """Both are the daemon's to answer; a reload that found something wrong ends with 1."""
    fake.answers["status"] = example.status
    assert json.loads(ctl("status", "--json").out)["schema"] == "veloxquant.status/1"
    fake.answers["reload"] = answers.Reloaded(generation=4, changed=True)
    assert ctl("reload").out == "generation 4, changed\n"
    fake.answers["reload"] = answers.Reloaded(generation=4, changed=False, warnings=("the old one is kept",))
    done = ctl("reload")
    assert (done.code, done.out) == (1, "generation 4, nothing changed\nwarning   the old one is kept\n")


def test_metrics_are_printed_as_a_scraper_reads_them(ctl: Run, fake: FakeTransport) -> None:
    """The daemon's text as it is, with one newline at its end; nobody else has such numbers."""
    text = "# TYPE veloxquant_uptime_seconds gauge\nveloxquant_uptime_seconds 12\n"
    fake.answers["metrics"] = answers.Metrics(content_type="text/plain; version=0.0.4", text=text)
    assert ctl("metrics").out == text
    shown = json.loads(ctl("metrics", "--json").out)
    assert shown == {"schema": "veloxquant.metrics/1", "content_type": "text/plain; version=0.0.4", "text": text}
    del fake.answers["metrics"]
    assert ctl("metrics").code == 3


def test_a_table_of_fits_is_shown_by_label(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """For people, a line for each variant."""
    fake.answers["fit"] = example.fit
    done = ctl("fit", "--model", "a/b")
    assert (done.code, done.err) == (0, "")
    assert {row.label for row in example.fit.rows} <= set(done.out.split())


def test_nobody_waits_for_a_daemon_that_is_not_to_be_asked(ctl: Run) -> None:
    """The two flags contradict each other; it ends at once."""
    done = ctl("wait", "--no-daemon", "--timeout", "60s")
    assert (done.code, done.out) == (3, "")
    assert "leave --no-daemon out" in done.err


def test_socket_prints_the_path_alone(ctl: Run, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For scripts; the flag wins over the environment, the environment over the default."""
    assert ctl("socket").out == f"{short_folder}/run/veloxquant/d.sock\n"
    monkeypatch.setenv("VELOXQUANT_SOCKET", "/run/env.sock")
    assert ctl("socket").out == "/run/env.sock\n"
    assert ctl("socket", "--socket", "/run/flag.sock").out == "/run/flag.sock\n"
    assert json.loads(ctl("socket", "--json").out) == {
        "schema": "veloxquant.socket/1",
        "path": "/run/env.sock",
        "exists": False,
    }
    assert ctl("socket", "--socket", "/run/" + "x" * 200).code == 2


def test_wait_gives_up_after_its_timeout(ctl: Run) -> None:
    """No daemon within the time is exit 3."""
    assert ctl("wait", "--timeout", "50ms").code == 3
    assert ctl("wait", "--timeout", "soon").code == 2


def test_wait_asks_a_silent_daemon_again(ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped for a while answers in the end; one that stays silent is exit 4 when the time is over."""
    silent = iter([NotAnswering("silent"), NotAnswering("silent"), None])

    def ping(_: Client, *, timeout_s: float) -> answers.Pong:
        assert 0 < timeout_s <= 20
        if (error := next(silent, NotAnswering("silent"))) is not None:
            raise error
        return answers.Pong(pid=7, generation=3)

    monkeypatch.setattr(Client, "ping", ping)
    monkeypatch.setattr(wait, "_PAUSE_S", 0.01)
    assert ctl("wait", "--timeout", "20s").out.endswith("pid 7, generation 3\n")
    assert ctl("wait", "--timeout", "100ms").code == 4


def test_wait_says_when_it_is_ready(ctl: Run, fake: FakeTransport) -> None:
    """As soon as the daemon answers."""
    fake.answers["ping"] = answers.Pong(pid=7, generation=3)
    assert ctl("wait").out.endswith("pid 7, generation 3\n")
    assert json.loads(ctl("wait", "--json").out)["pid"] == 7


def test_version_does_not_need_a_daemon(ctl: Run) -> None:
    """Versions are told with or without one."""
    done = ctl("version", "--timeout", "100ms")
    assert done.code == 0
    assert done.out.startswith(f"veloxquant {__version__}")
    assert done.out.endswith("daemon not running\n")


def test_version_does_not_need_a_valid_configuration(ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports trouble with the configuration can say which version has it."""
    monkeypatch.setenv("VELOXQUANT_DAEMON_DRAIN_S", "soon")
    assert ctl("config", "check").code == 2
    assert ctl("version").code == 0


@pytest.fixture
def broken_file(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration file with a misspelt key."""
    file = short_folder / "veloxquant.toml"
    file.write_text("[daemon]\ndrain_z = 3\n")
    file.chmod(0o600)
    monkeypatch.setenv("VELOXQUANT_CONFIG", str(file))


@pytest.mark.usefixtures("broken_file")
@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("plan", "--model", "a/b"),
        ("fit", "--model", "a/b"),
        ("explain", "--plan-id", "0a"),
        ("methods",),
        ("records",),
        ("hardware",),
        ("reload",),
        ("wait",),
        ("socket",),
        ("version",),
    ],
)
def test_a_broken_configuration_file_keeps_nobody_from_a_daemon_that_runs(
    ctl: Run, fake: FakeTransport, example: SimpleNamespace, words: tuple[str, ...]
) -> None:
    """The daemon goes on with its earlier settings: it is asked where it is by default, with the trouble as a note."""
    fake.answers |= {
        "status": example.status,
        "plan": example.plan,
        "fit": example.fit,
        "explain": answers.Explanation(plan_id="0a", label=None, lines=("bytes",)),
        "methods": answers.MethodList(generation=1, methods=()),
        "records": answers.RecordPage(
            generation=1, directory="/records", total=0, offset=0, records=(), skipped_total=0
        ),
        "hardware": example.hardware,
        "reload": answers.Reloaded(generation=4, changed=False),
        "ping": answers.Pong(pid=7, generation=3),
        "hello": answers.Hello(
            server="veloxquant", version=__version__, protocol=1, capabilities=(), pid=7, generation=3
        ),
    }
    done = ctl(*words, "--json")
    assert (done.code, json.loads(done.out)["schema"].partition("/")[0]) == (0, f"veloxquant.{words[0]}")
    assert "daemon.drain_z" in done.err
    assert f"the daemon is asked at {paths.socket_path()}" in done.err


@pytest.mark.usefixtures("broken_file")
@pytest.mark.parametrize("words", [("plan", "--model", "a/b"), ("methods",), ("status", "--no-daemon")])
def test_without_a_daemon_a_broken_configuration_file_is_the_answer(ctl: Run, words: tuple[str, ...]) -> None:
    """This process would have to read it; it is refused by its key, not done without."""
    done = ctl(*words, "--json")
    assert (done.code, json.loads(done.out)["error"]["field"]) == (2, "daemon.drain_z")


def test_config_is_shown_checked_and_located(ctl: Run, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`path` names the file, `check` finds mistakes by key, `show` has every layer folded in."""
    path = f"{short_folder}/config/veloxquant/veloxquant.toml"
    assert ctl("config", "path").out == f"{path}\n"
    assert "does not exist" in ctl("config", "check").out
    file = short_folder / "mine.toml"
    file.write_text('[planner]\nreserve_bytes = "1GiB"\n')
    assert ctl("config", "check", str(file)).out == f"{file} is valid\n"
    monkeypatch.setenv("VELOXQUANT_CONFIG", str(file))
    shown = json.loads(ctl("config", "show", "--json").out)
    assert shown["config"]["planner"]["reserve_bytes"] == 2**30
    assert "reserve_bytes = 1073741824" in ctl("config", "show").out
    file.write_text("[planner]\nreserve = 1\n")
    done = ctl("config", "check")
    assert done.code == 2
    assert "planner.reserve" in done.err


def test_an_answer_of_this_process_says_so(ctl: Run, example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon the plan is made here and a note on stderr says so; --quiet and --no-daemon need no note."""
    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", lambda *_args: example.plan)
    fallen = ctl("plan", "--model", "a/b")
    assert fallen.code == 0
    assert fallen.err.startswith("note: no veloxquant daemon is running")
    assert ctl("plan", "--model", "a/b", "--quiet").err == ""
    assert ctl("plan", "--model", "a/b", "--no-daemon").err == ""


def test_the_objectives_are_the_workloads() -> None:
    """They are written twice, since `--help` must not load what the first ones need."""
    assert question.OBJECTIVES == OBJECTIVES

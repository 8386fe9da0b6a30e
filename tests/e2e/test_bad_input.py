"""Bad input over the socket and on the command line: a typed error that names the field and the way out."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant import errors
from veloxquant.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("no such folder", {"model": {"path": "/nowhere/at/all"}}, "model_not_found", "model.path"),
    ("no such id", {"model": {"id": "org/never-downloaded"}}, "model_not_found", "model.id"),
    ("an unknown family", {"model": {"config": {"model_type": "lama"}}}, "model_not_supported", "model.config"),
    ("no model_type", {"model": {"config": {"hidden_size": 5}}}, "model_config_invalid", "model.config"),
    ("a negative length", {"workload": {"context_length": -1}}, "invalid_params", "workload.context_length"),
    ("a context of 10^9", {"workload": {"context_length": 10**9}}, "invalid_params", "workload.context_length"),
    ("an absurd length", {"workload": {"generation_length": 2**60}}, "invalid_params", "workload.generation_length"),
    ("a length of text", {"workload": {"batch_size": "two"}}, "invalid_params", "workload.batch_size"),
    ("a misspelt field", {"workload": {"contxt_length": 1}}, "invalid_params", "workload.contxt_length"),
    ("an unknown objective", {"workload": {"objective": "speed"}}, "invalid_params", "workload.objective"),
    ("a negative budget", {"memory_budget_bytes": -1}, "invalid_params", "memory_budget_bytes"),
    ("cores below one", {"hardware": {"gpu_cores": 0}}, "invalid_params", "hardware.gpu_cores"),
    ("no memory at all", {"hardware": {"total_memory_bytes": 0}}, "invalid_params", "hardware.total_memory_bytes"),
    ("another engine version", {"engine": {"version": "0.1.0"}}, "engine_unavailable", "engine.version"),
    ("another engine", {"engine": {"name": "vllm"}}, "invalid_params", "engine.name"),
    ("an unknown method", {"methods": ["afine"]}, "method_not_found", "methods"),
]


@pytest.mark.parametrize(("params", "name", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_params_over_the_socket(
    client: Client, tiny_model: dict[str, Any], params: dict[str, Any], name: str, field: str
) -> None:
    """Each is its own error class again on this side, with field and hint; the daemon goes on."""
    given = {"model": tiny_model, **params}
    with pytest.raises(errors.VeloxError) as caught:
        client.plan(**given)
    assert (caught.value.name, caught.value.field) == (name, field)
    assert type(caught.value) is not errors.VeloxError
    assert caught.value.hint
    assert client.ping().pong


def test_bad_input_on_the_command_line(
    ask: Callable[..., Any], inline: Callable[..., str], tiny: dict[str, Any]
) -> None:
    """The same errors with exit code 2, as one JSON object."""
    good = inline("tiny", tiny)
    wrong = inline("unknown-family", {**tiny, "model_type": "lama"})
    for words, name, field in (
        (("--model", "/nowhere/at/all"), "model_not_found", "model.path"),
        (("--config", "/nowhere/config.json"), "model_not_found", "--config"),
        (("--config", wrong), "model_not_supported", "model.config"),
        (("--config", good, "--context", "-3"), "invalid_params", "--context"),
        (("--config", good, "--context", "1000000000"), "invalid_params", "workload.context_length"),
        (("--config", good, "--engine-version", "0.1.0"), "engine_unavailable", "engine.version"),
        (("--config", good, "--gpu-cores", "0"), "invalid_params", "hardware.gpu_cores"),
        (("--config", good, "--method", "afine"), "method_not_found", "methods"),
    ):
        code, value = ask("plan", *words)
        assert (code, value["schema"]) == (2, "veloxquant.error/1"), words
        assert (value["error"]["name"], value["error"]["field"]) == (name, field), words
        assert value["error"]["hint"], words


def test_a_folder_whose_config_is_no_json(ask: Callable[..., Any], short_folder: Path) -> None:
    """Named by file, and a folder without any config is as well."""
    empty = ask("plan", "--model", str(short_folder))
    (short_folder / "config.json").write_text("{")
    broken = ask("plan", "--model", str(short_folder))
    for code, value in (empty, broken):
        assert (code, value["error"]["name"]) == (2, "model_config_invalid")
        assert str(short_folder) in value["error"]["message"]


def test_an_unknown_family_is_never_sized_by_the_standard_formula(client: Client, tiny: dict[str, Any]) -> None:
    """All the fields of a llama are there, and still the name alone decides."""
    with pytest.raises(errors.ModelNotSupported, match="lama"):
        client.plan({**tiny, "model_type": "lama"}, hardware={"working_set_bytes": 2**34})


def test_a_second_daemon_is_refused(running: Any) -> None:
    """Exit 75, naming the pid that holds the lock; the first one is untouched."""
    command = [sys.executable, "-m", "veloxquant.ctl.main", "daemon", "--socket", running.socket]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 75
    assert f"pid {running.process.pid}" in done.stderr
    assert Client(running.socket, fallback=False).ping().pid == running.process.pid


def test_socket_paths_that_cannot_be(ask: Callable[..., Any], short_folder: Path, running: Any) -> None:
    """Too long is refused with the byte count; what is not a socket is not talked to; both with exit 2."""
    from veloxquant.ctl.main import main

    (short_folder / "file").write_text("")
    assert main(["status", "--socket", f"/{'x' * 200}"]) == 2
    assert main(["status", "--socket", str(short_folder / "file")]) == 2
    command = [sys.executable, "-m", "veloxquant.ctl.main", "daemon", "--socket", f"/{'x' * 200}"]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "201 bytes" in done.stderr


def test_a_daemon_refuses_a_path_that_is_not_ours(short_folder: Path, running: Any) -> None:
    """A folder that others can enter, and a file that is no socket, are refused before anything is bound."""
    place = short_folder / "open"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    command = [sys.executable, "-m", "veloxquant.ctl.main", "daemon", "--socket", str(place / "d.sock")]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "chmod 700" in done.stderr


def test_without_the_engine_a_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inline: Callable[..., str],
    tiny: dict[str, Any],
) -> None:
    """No mlx-lm: a known family is read from its config with a warning, a version cannot be asked for."""
    import json

    from veloxquant.ctl.main import main

    monkeypatch.setattr("veloxquant.models.profile.engine_version", lambda: None)
    words = ["plan", "--no-daemon", "--json", "--config", inline("tiny", tiny), "--weights", "1MiB"]
    assert main([*words, "--memory", "16GiB", "--working-set", "11GiB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["source"] == "static"
    assert "model_not_traced" in [warning["code"] for warning in plan["warnings"]]
    assert main([*words, "--engine-version", "0.32.2"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["name"] == "engine_unavailable"


def test_a_full_disk_costs_the_cache_and_not_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inline: Callable[..., str],
    tiny: dict[str, Any],
) -> None:
    """Where traces cannot be kept the model is traced all the same, with a warning; the doctor names the fix, too."""
    import json

    from veloxquant.ctl.main import main

    monkeypatch.setenv("VELOXQUANT_TRACE_CACHE_DIRECTORY", "/dev/full/traces")
    words = ["plan", "--no-daemon", "--json", "--config", inline("tiny", tiny), "--weights", "1MiB"]
    assert main([*words, "--memory", "16GiB", "--working-set", "11GiB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["source"] == "traced"
    (said,) = [note["text"] for note in plan["warnings"] if note["code"] == "trace_not_kept"]
    assert "trace.cache_directory" in said
    assert main(["doctor", "--json"]) == 1
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["trace cache"]["state"] == "failed"
    assert "trace.cache_directory" in checks["trace cache"]["fix"]


def test_talking_nonsense_to_the_daemon(running: Any) -> None:
    """Bytes that are no request get one typed error, and the next request its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(10)
        raw.connect(running.socket)
        raw.sendall(b'\xff\xfe nonsense\n{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
        data = b""
        while data.count(b"\n") < 2:
            data += raw.recv(65536)
    first, second = data.splitlines()
    assert b'"parse_error"' in first
    assert b'"pong":true' in second

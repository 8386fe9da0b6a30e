"""`sensitivity` on a tiny model: what it measures, keeps and says, and what plans make of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate, load

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))
sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))

import tiny_model
from daemon_kit import Daemon, wait_for

import veloxquant
from veloxquant.benchmarks.calibrations import Calibrations
from veloxquant.benchmarks.storage import RECORD_NAME
from veloxquant.caches.held import held_bytes
from veloxquant.config import load as load_config
from veloxquant.ctl import checks_stores
from veloxquant.measure import loading, sensitivity

Run = Callable[..., Any]
QUICK = ("--tokens", "260", "--draws", "1")
PROMPT = "one two three four five six seven eight nine ten. " * 14
"""700 tokens, of which some hundreds are packed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny llama."""
    return str(tiny_model.save(tmp_path_factory.mktemp("models") / "tiny-llama"))


def asked(folder: str) -> dict[str, Any]:
    """A plan's params."""
    return {
        "model": {"path": folder},
        "workload": {"context_length": len(PROMPT), "generation_length": 4},
        "methods": ["adaptive"],
    }


def test_what_is_measured_is_shown_and_kept(ctl: Run, folder: str, tmp_path: Path) -> None:
    """Layers, the dearest first, a sum, the text by name, the time, and the file."""
    done = ctl("sensitivity", folder, *QUICK, "--records", str(tmp_path / "new"))
    assert done.code == 0, done.err
    (path,) = (tmp_path / "new" / "calibrations").iterdir()
    assert RECORD_NAME.fullmatch(path.name)
    assert str(path) in done.out
    assert "pydoc topics of Python" in done.out
    assert " s\n" in done.out
    lines = done.out.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("LAYER"))
    assert lines[head].split() == ["LAYER", *(f"{side}{bits}" for side in "KV" for bits in (2, 3, 4, 5, 6, 8))]
    first, second, total = (line.split() for line in lines[head + 1 : head + 4])
    assert {first[0], second[0], total[0]} == {"0", "1", "all"}
    sums = [float(row[1]) + float(row[7]) for row in (first, second, total)]
    assert sums[0] >= sums[1]
    assert sums[2] == pytest.approx(sums[0] + sums[1], rel=0.1)


def test_json_is_the_calibration_itself(ctl: Run, folder: str, tmp_path: Path) -> None:
    """With seconds and path; a text of one's own is named with a digest."""
    text = tmp_path / "text.txt"
    text.write_text("words and numbers 0123456789 " * 10)
    done = ctl("sensitivity", folder, *QUICK, "--text", str(text), "--benchmarks", str(tmp_path), "--json")
    assert done.code == 0, done.out
    value = json.loads(done.out)
    store = Calibrations(tmp_path)
    store.look()
    ((key, kept),) = store.known.items()
    told = value["calibration"]
    assert (value["schema"], told["model_id"], told["config_hash"]) == ("veloxquant.sensitivity/1", *key)
    assert (told["tokens"], len(told["layers"])) == (260, 2)
    assert told["text"].startswith(f"{text}, SHA-256 ")
    assert (told["engine_version"], told["mlx_version"]) == (kept.engine_version, mx.__version__)
    assert value["path"] == str(next(store.folder.iterdir()))
    assert value["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--tokens", "100"), "--tokens"),
        (("--tokens", "100000"), "--tokens"),
        (("--tokens", "x"), "--tokens"),
        (("--draws", "0"), "--draws"),
        (("--text", "missing.txt"), "--text"),
        (("--text", __file__, "--tokens", "0"), "--tokens"),
        (("--text", os.devnull), "prompt"),
    ],
)
def test_what_cannot_be_read_is_refused(
    ctl: Run, folder: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str
) -> None:
    """Before the weights are."""
    monkeypatch.setattr(loading, "load_model", lambda _: pytest.fail("the weights are read"))
    done = ctl("sensitivity", folder, *words, "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["field"]) == (2, field)
    assert error["hint"]


def test_a_short_text_and_a_missing_model_are_refused(ctl: Run, folder: str, tmp_path: Path) -> None:
    """With what to do."""
    text = tmp_path / "text.txt"
    text.write_text("a few words")
    error = json.loads(ctl("sensitivity", folder, "--text", str(text), "--json").out)["error"]
    assert "has 11 tokens: at least 256" in error["message"]
    error = json.loads(ctl("sensitivity", str(tmp_path / "none"), "--json").out)["error"]
    assert error["name"] == "model_not_found"


def test_a_directory_that_cannot_be_written_is_told_before_the_run(
    ctl: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place."""
    monkeypatch.setattr(loading, "load_model", lambda _: pytest.fail("the weights are read"))
    (tmp_path / "calibrations").write_text("in the way")
    done = ctl("sensitivity", folder, *QUICK, "--records", str(tmp_path), "--json")
    assert json.loads(done.out)["error"]["name"] == "store_unavailable"


def test_an_interrupt_leaves_nothing(ctl: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 130, and no file half written."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "sensitivities", stop)
    assert ctl("sensitivity", folder, *QUICK, "--records", str(tmp_path)).code == 130
    assert list((tmp_path / "calibrations").iterdir()) == []


def test_a_calibration_makes_a_running_daemon_offer_adaptive(
    ctl: Run, folder: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with the command; calibrated; planned with bits for each layer; applied: held as planned."""
    daemon = Daemon(short_folder)
    try:
        daemon.ready()
        before = daemon.call("plan", asked(folder))
        refused = {one["label"]: one for one in before["rejected"] if one["method"] == "adaptive"}
        assert {one["reason"] for one in refused.values()} == {"not_calibrated"}
        assert all("veloxquantctl sensitivity MODEL" in one["detail"] for one in refused.values())
        done = ctl("sensitivity", folder, *QUICK, "--records", str(daemon.records))
        assert done.code == 0, done.err
        wait_for(lambda: daemon.call("status")["generation"] > before["generation"], "a new generation")
        plan = daemon.call("plan", asked(folder))
    finally:
        daemon.stop()
    chosen = plan["chosen"]
    assert chosen["method"] == "adaptive"
    own = chosen["cache_config"]["layer_params"]
    assert len(own) == tiny_model.LAYERS
    assert all(set(params) == {"keys", "values", "order"} for params in own)
    model, tokenizer = load(folder)
    veloxquant.apply(model, plan)
    caches = model.make_cache()
    tokens = tokenizer.encode(PROMPT)
    generate(model, tokenizer, tokens, max_tokens=4, prompt_cache=caches)
    assert len(tokens) == len(PROMPT)
    assert all(cache.offset >= len(PROMPT) for cache in caches)
    assert sum(map(held_bytes, caches)) == chosen["memory"]["stored_bytes"]


def test_doctor_names_what_is_not_used(tmp_path: Path) -> None:
    """Sound, then with a broken file, then with a folder that is none."""
    config = load_config(flags={"records.directory": str(tmp_path)})
    assert checks_stores.calibrations_readable(config).state == "ok"
    (tmp_path / "calibrations").mkdir()
    (tmp_path / "calibrations" / "bad.json").write_text("{")
    found = checks_stores.calibrations_readable(config)
    assert found.state == "note"
    assert "bad.json: it is no calibration" in found.text
    (tmp_path / "calibrations" / "bad.json").unlink()
    (tmp_path / "calibrations").rmdir()
    (tmp_path / "calibrations").write_text("")
    assert checks_stores.calibrations_readable(config).state == "failed"


def test_a_plan_without_a_daemon_uses_it_too(ctl: Run, folder: str, tmp_path: Path) -> None:
    """Not calibrated before, chosen after; a run of the method by itself is built by it as well."""
    words = ("plan", "--no-daemon", "--json", "--model", folder, "--method", "adaptive", "--records", str(tmp_path))
    before = json.loads(ctl(*words).out)
    assert before["chosen"] is None
    assert ctl("sensitivity", folder, *QUICK, "--records", str(tmp_path)).code == 0
    after = json.loads(ctl(*words).out)
    assert after["chosen"]["method"] == "adaptive"
    run = ("profile", "--no-daemon", "--json", "--model", folder, "--prompt", "x", "--max-tokens", "1")
    done = ctl(*run, "--method", "adaptive-4", "--records", str(tmp_path))
    assert done.code == 0, done.out
    assert ctl(*run, "--method", "adaptive-4").code == 1

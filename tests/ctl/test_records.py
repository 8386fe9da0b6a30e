"""`veloxquantctl records`: everything a person does with a benchmark directory."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.ctl import records_progress
from veloxquant.ctl.records import ACTIONS
from veloxquant.ctl.records_progress import Progress
from veloxquant.ctl.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchmarkDatabase:
    """Four records in the configured directory, two of them of one measurement on two versions of MLX."""
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(tmp_path / "benchmarks"))
    db = BenchmarkDatabase(tmp_path / "benchmarks")
    db.add("fp16", "m/x", context_length=1024, mlx_version="0.31.0", throughput_tok_s=20.5)
    db.add("fp16", "m/x", context_length=1024, mlx_version="0.32.0", tags=["night", "run"])
    db.add("affine4-g64", "m/x", context_length=1024)
    db.add("fp16", "m/y", context_length=1024)
    db.close()
    return db


def _id(store: BenchmarkDatabase, method: str, model: str) -> str:
    return min(key for key, one in store.records.items() if (one.method, one.model_id) == (method, model))


def test_show_names_every_field(ctl: Run, store: BenchmarkDatabase) -> None:
    """For people and as the JSON form of the record; an id that is not there is refused with the nearest one."""
    record_id = _id(store, "fp16", "m/x")
    shown = ctl("records", "show", record_id)
    assert shown.code == 0
    rows = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert (rows["method"], rows["tags"], rows["workload.objective"]) == ("fp16", "night run", "balanced")
    value = json.loads(ctl("records", "show", record_id, "--json").out)
    assert (value["schema"], value["record"]) == ("veloxquant.record/1", store.records[record_id].to_dict())
    wrong = ctl("records", "show", record_id[:-1] + "x")
    assert (wrong.code, record_id in wrong.err) == (2, True)


def test_verify_answers_with_its_exit_code(ctl: Run, store: BenchmarkDatabase) -> None:
    """0 for a sound directory; 1 with reasons where a file is set aside or the index differs."""
    assert ctl("records", "verify").code == 0
    (store.records_dir / "bad.json").write_text("[]")
    store.index_path.write_text("{")
    done = ctl("records", "verify")
    assert done.code == 1
    assert "records/bad.json" in done.out
    assert "index.json is damaged" in done.out
    value = json.loads(ctl("records", "verify", "--json").out)
    assert (value["sound"], value["records"], list(value["set_aside"])) == (False, 4, ["records/bad.json"])
    assert store.index_path.read_text() == "{"


def test_export_and_import_give_the_same_directory(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Through a file, with filters, and again without any change."""
    file, other = tmp_path / "all.jsonl", tmp_path / "other"
    other.mkdir()
    assert ctl("records", "export", str(file)).code == 0
    done = ctl("records", "import", str(file), "--records", str(other))
    assert (done.code, done.out) == (0, "4 added, 0 replaced, 0 kept beside, 0 older, 0 same\n")
    assert {k: r.to_dict() for k, r in BenchmarkDatabase(other).records.items()} == {
        k: r.to_dict() for k, r in store.records.items()
    }
    again = json.loads(ctl("records", "import", str(file), "--records", str(other), "--json").out)
    assert (again["added"], again["same"], again["bad_lines"]) == (0, 4, [])
    some = ctl("records", "export", "-", "--method", "fp16", "--model", "m/y").out.splitlines()
    assert [json.loads(line)["model_id"] for line in some] == ["m/y"]
    value = json.loads(ctl("records", "export", "-", "--json").out)
    assert (value["count"], len(value["records"])) == (4, 4)


def test_export_for_a_spreadsheet(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """CSV, on the terminal or in a file; with no record there is still a header."""
    rows = list(csv.DictReader(io.StringIO(ctl("records", "export", "-", "--csv").out)))
    assert sorted(row["id"] for row in rows) == sorted(store.records)
    file = tmp_path / "x.csv"
    assert json.loads(ctl("records", "export", str(file), "--csv", "--model", "none", "--json").out)["count"] == 0
    assert file.read_text().startswith("id,method,model_id,")


def test_import_names_bad_lines_and_keeps_the_good(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Exit code 1; a dry run says the same and changes nothing."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "method": "fp16", "model_id": "m/z"}\n{"id": "b"}\nnot json\n')
    for flags, count in ((["--dry-run"], 4), ([], 5)):
        done = ctl("records", "import", str(file), *flags)
        assert done.code == 1
        assert "line 2: method is missing" in done.out
        assert "line 3: it is not JSON" in done.out
        assert "1 added" in done.out
        assert len(BenchmarkDatabase(store.storage_dir).records) == count
    value = json.loads(ctl("records", "import", str(file), "--json").out)
    assert [one["line"] for one in value["bad_lines"]] == [2, 3]


def test_merge_takes_in_a_colleagues_directory(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Nothing of either is lost, theirs is left as it was, and merging again changes nothing."""
    theirs = BenchmarkDatabase(tmp_path / "theirs")
    theirs.add("fp16", "m/x", context_length=1024, mlx_version="0.33.0")
    theirs.add("fp16", "m/z", context_length=1024)
    theirs.close()
    (theirs.records_dir / "bad.json").write_text("{")
    before = {path: path.read_bytes() for path in theirs.storage_dir.rglob("*") if path.is_file()}
    foretold = ctl("records", "merge", str(theirs.storage_dir), "--dry-run")
    assert foretold.out == "would be: 2 added, 0 replaced, 0 kept beside, 0 older, 0 same\n"
    done = ctl("records", "merge", str(theirs.storage_dir))
    assert (done.code, done.out) == (0, foretold.out.removeprefix("would be: "))
    assert "bad.json" in done.err
    held = BenchmarkDatabase(store.storage_dir).records.values()
    versions = sorted(one.mlx_version for one in held if (one.method, one.model_id) == ("fp16", "m/x"))
    assert versions == ["0.31.0", "0.32.0", "0.33.0"]
    again = json.loads(ctl("records", "merge", str(theirs.storage_dir), "--json").out)
    assert (again["same"], again["changes"], list(again["set_aside"])) == (2, [], ["bad.json"])
    assert {path: path.read_bytes() for path in theirs.storage_dir.rglob("*") if path.is_file()} == before


def test_prune_shows_and_then_does(ctl: Run, store: BenchmarkDatabase) -> None:
    """The measurement that a newer MLX supersedes goes first; what is pinned stays."""
    old = next(key for key, one in store.records.items() if one.mlx_version == "0.31.0")
    first = _id(store, "affine4-g64", "m/x")
    assert ctl("records", "pin", first).out == f"{first} is pinned\n"
    value = json.loads(ctl("records", "prune", "--dry-run", "--max-records", "3", "--json").out)
    newer = _id(store, "fp16", "m/x")
    assert [(one["id"], one["superseded_by"]) for one in value["evicted"]] == [(old, newer)]
    assert (value["left"], len(BenchmarkDatabase(store.storage_dir).records)) == (3, 4)
    done = ctl("records", "prune", "--max-records", "1")
    assert done.out.splitlines()[-1].startswith("3 records, ")
    assert set(BenchmarkDatabase(store.storage_dir).records) == {first}
    assert json.loads(ctl("records", "unpin", first, "--json").out)["pinned"] is False
    assert "0 records" in ctl("records", "prune").out


def test_pruning_to_less_than_is_pinned_says_so(ctl: Run, store: BenchmarkDatabase) -> None:
    """The bound cannot be kept, and the way out is named."""
    for record_id in store.records:
        ctl("records", "pin", record_id)
    done = ctl("records", "prune", "--max-records", "2")
    assert done.out.startswith("0 records")
    assert "unpin" in done.err


def test_a_record_without_a_date_has_no_age(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Not the age of the epoch."""
    (tmp_path / "in.jsonl").write_text('{"id": "undated", "method": "fp16", "model_id": "m/z"}')
    ctl("records", "import", str(tmp_path / "in.jsonl"))
    (line,) = (line for line in ctl("records", "--no-daemon").out.splitlines() if line.startswith("undated"))
    assert line.split()[-1] == "-"


def test_the_configured_bounds_hold_for_an_import(
    ctl: Run, store: BenchmarkDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """records.max_records is what the command line keeps, too."""
    monkeypatch.setenv("VELOXQUANT_RECORDS_MAX_RECORDS", "3")
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "method": "fp16", "model_id": "m/z", "created_at": "2099-01-01"}\n')
    assert ctl("records", "import", str(file)).code == 0
    held = BenchmarkDatabase(store.storage_dir).records
    assert len(held) == 3
    assert "a" in held


def test_the_schema_is_printed(ctl: Run) -> None:
    """For whoever writes records with another program."""
    value = json.loads(ctl("records", "schema").out)
    assert value["required"] == ["id", "method", "model_id"]
    assert json.loads(ctl("records", "schema", "--json").out)["json_schema"] == value


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["show"], "target"),
        (["verify", "/nowhere"], "target"),
        (["verify", ".", "--records", "."], "target"),
        (["list", "--since", "7"], "--since"),
        (["list", "--since", "2026-13-01"], "--since"),
        (["list", "--since", "last week"], "--since"),
        (["export", "--chip", ""], "--chip"),
        (["prune", "--chip", "M4"], "--chip"),
        (["list", "x"], "target"),
        (["verify", "--csv"], "--csv"),
        (["list", "--dry-run"], "--dry-run"),
        (["prune", "--max-records", "0"], "--max-records"),
        (["pin", "none"], "target"),
        (["export", "/"], "target"),
        (["import", "/nowhere/x"], "target"),
        (["import", "/"], "target"),
        (["export", "/nowhere/x"], "target"),
        (["merge", "/nowhere"], "target"),
        (["merge", "/"], "target"),
        (["shwo", "x"], None),
    ],
)
def test_slips_are_usage_errors(ctl: Run, store: BenchmarkDatabase, words: list[str], field: str | None) -> None:
    """Exit code 2, naming what is wrong."""
    done = ctl("records", *words, "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["name"]) == (2, "invalid_params")
    assert field is None or error["field"] == field


def test_a_directory_is_not_merged_into_itself(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Not by another name either."""
    (tmp_path / "link").symlink_to(store.storage_dir)
    assert ctl("records", "merge", str(tmp_path / "link")).code == 2


def test_every_action_takes_flags_that_exist(ctl: Run) -> None:
    """The table of actions and the help agree."""
    text = ctl("records", "--help").out
    assert all(f"--{flag.replace('_', '-')}" in text for _, flags in ACTIONS.values() for flag in flags)


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "quiet", "shown"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_bar_is_drawn_for_people_only(
    monkeypatch: pytest.MonkeyPatch, *, screen: bool, quiet: bool, shown: bool
) -> None:
    """On a terminal, not with --quiet; it is gone at the end; half of the work is half of the bar."""
    monkeypatch.setattr(records_progress, "_PATIENCE_S", 0.0)
    err = _Screen() if screen else io.StringIO()
    with Progress(Terminal(io.StringIO(), err, quiet=quiet), "merging", 60) as progress:
        progress.at(30)
    assert (f"merging [{'#' * 15}{'.' * 15}]  50%" in err.getvalue()) is shown
    assert err.getvalue().endswith("\r\033[K") is shown

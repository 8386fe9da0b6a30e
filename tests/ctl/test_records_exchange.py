"""`veloxquantctl records` between directories and files: filters, what is evicted, spreadsheets, new directories."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Any]

NOW = dt.datetime.now(tz=dt.UTC)


def record(record_id: str, days: float, **fields: Any) -> BenchmarkRecord:
    """A measurement so many days old, each of a context of its own."""
    at = (NOW - dt.timedelta(days=days)).isoformat()
    context = 1024 + int(days * 24)
    return BenchmarkRecord(record_id, "fp16", "m/x", context_length=context, created_at=at, **fields)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchmarkDatabase:
    """Three records in the configured directory that differ in all that can be filtered."""
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(tmp_path / "benchmarks"))
    db = BenchmarkDatabase(tmp_path / "benchmarks")
    db.upsert(record("new", 0.5, chip="Apple M4", mlx_version="0.32.4", tags=["night run", "pinned"]))
    db.upsert(record("old", 10, chip="Apple M4 Max", mlx_version="0.31.0", source="lab", architecture="llama"))
    db.upsert(BenchmarkRecord.from_dict({"id": "undated", "method": "affine4-g64", "model_id": "m/y", "later": 1}))
    db.close()
    return db


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--chip", "m4"], {"new"}),
        (["--chip", "apple  M4 max"], {"old"}),
        (["--source", "lab"], {"old"}),
        (["--architecture", "llama"], {"old"}),
        (["--mlx-version", "0.32.4"], {"new"}),
        (["--pinned"], {"new"}),
        (["--tag", "night run"], {"new"}),
        (["--since", "7d"], {"new"}),
        (["--since", "1000d"], {"new", "old"}),
        (["--since", "1970-01-02"], {"new", "old"}),
        (["--since", (NOW - dt.timedelta(days=11)).date().isoformat()], {"new", "old"}),
        (["--since", (NOW - dt.timedelta(days=9)).isoformat()], {"new"}),
        (["--model", "m/x", "--chip", "M4 Max", "--since", "2000-01-01"], {"old"}),
        (["--method", "affine4-g64"], {"undated"}),
    ],
)
def test_list_and_export_filter_alike(
    ctl: Run, store: BenchmarkDatabase, filters: list[str], expected: set[str]
) -> None:
    """As text, as JSON and as lines."""
    page = json.loads(ctl("records", "--no-daemon", "--json", *filters).out)
    assert ({one["id"] for one in page["records"]}, page["total"]) == (expected, len(expected))
    value = json.loads(ctl("records", "export", "--json", *filters).out)
    assert {one["id"] for one in value["records"]} == expected
    lines = ctl("records", "export", *filters).out.splitlines()
    assert {json.loads(line)["id"] for line in lines} == expected


@pytest.mark.parametrize("words", [["list", "--chipp", "M4"], ["--chipp", "M4"], ["export", "--chipp=M4"]])
def test_an_option_that_is_not_known_is_named_as_one(ctl: Run, words: list[str]) -> None:
    """Not its value, and with the one that comes closest."""
    done = ctl("records", *words)
    assert done.code == 2
    assert "'--chipp' is no known option" in done.err
    assert "did you mean --chip?" in done.err
    assert "'-c' is no known option" in ctl("records", "-c", "M4").err


def test_a_spreadsheets_file_comes_back_in(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Every record exactly, by the name of the file or by its header, into a folder that is made for it."""
    file, other = tmp_path / "all.csv", tmp_path / "a" / "b"
    assert ctl("records", "export", str(file)).code == 0
    assert file.read_text().startswith("id,method,")
    assert ctl("records", "import", str(file), "--records", str(other), "--dry-run").out.startswith("would be: 3 added")
    assert not other.exists()
    assert ctl("records", "import", str(file), "--records", str(other)).out.startswith("3 added")
    held = BenchmarkDatabase(other).records
    assert {key: one.to_dict() for key, one in held.items()} == {
        key: one.to_dict() for key, one in store.records.items()
    }
    plain = file.rename(tmp_path / "no suffix")
    assert json.loads(ctl("records", "import", str(plain), "--json").out)["same"] == 3
    file.write_text('{"id": "lines", "method": "fp16", "model_id": "m/z"}\n')
    assert json.loads(ctl("records", "import", str(file), "--json").out)["added"] == 1


def test_a_bad_cell_is_named_by_line_and_column(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """Exit code 1; the other rows are taken in."""
    file = tmp_path / "in.csv"
    file.write_text("id,method,model_id,context_length\na,fp16,m/z,many\nb,fp16,m/z,8\n")
    done = ctl("records", "import", str(file))
    assert done.code == 1
    assert "line 2: column context_length: 'many'" in done.out
    assert done.out.splitlines()[-1] == "1 added, 0 replaced, 0 kept beside, 0 older, 0 same, 1 line refused"


def test_what_makes_room_is_told(
    ctl: Run, store: BenchmarkDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number and by id, in a dry run as in the real one; the same source again changes nothing."""
    monkeypatch.setenv("VELOXQUANT_RECORDS_MAX_RECORDS", "3")
    theirs = BenchmarkDatabase(tmp_path / "theirs")
    for one in (record("newer", 5), record("oldest", 100)):
        theirs.upsert(one)
    theirs.upsert(BenchmarkRecord.from_dict({"id": "z", "method": "fp16", "model_id": "m/z"}))
    theirs.close()
    name = str(theirs.storage_dir)
    foretold = json.loads(ctl("records", "merge", name, "--dry-run", "--json").out)
    assert (foretold["added"], foretold["no_room"], [one["id"] for one in foretold["evicted"]]) == (1, 2, ["undated"])
    done = ctl("records", "merge", name)
    lines = done.out.splitlines()
    assert (lines[0].split()[:2], "the oldest" in lines[0]) == (["evicted", "undated"], True)
    assert lines[1] == "1 added, 0 replaced, 0 kept beside, 0 older, 0 same, 2 no room, 1 evicted to make room"
    assert "max_records" in done.err
    assert set(BenchmarkDatabase(store.storage_dir).records) == {"new", "newer", "old"}
    again = json.loads(ctl("records", "merge", name, "--json").out)
    assert (again["added"], again["same"], again["no_room"], again["evicted"]) == (0, 1, 2, [])
    ctl("records", "export", str(tmp_path / "x"), "--records", name)
    assert json.loads(ctl("records", "import", str(tmp_path / "x"), "--json").out)["no_room"] == 2


def test_verify_takes_the_directory_as_a_word(ctl: Run, store: BenchmarkDatabase, tmp_path: Path) -> None:
    """As merge does."""
    BenchmarkDatabase(tmp_path / "other").add("fp16", "m/x", context_length=1)
    assert json.loads(ctl("records", "verify", str(tmp_path / "other"), "--json").out)["records"] == 1


def test_a_directory_that_is_only_read_is_not_made(ctl: Run, tmp_path: Path) -> None:
    """A misspelt name is an error where nothing is put into it."""
    assert ctl("records", "export", "--records", str(tmp_path / "nowhere")).code == 2
    assert not (tmp_path / "nowhere").exists()

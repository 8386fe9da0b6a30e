"""Ids and the default folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import benchmark_fingerprint, default_benchmark_dir

if TYPE_CHECKING:
    import pytest


def test_ids_are_those_of_the_public_tool() -> None:
    """Both ids were made by the public tool for method kivi, model m/x, context 8192, batch 1."""
    assert benchmark_fingerprint("kivi", "m/x", 8192, 1, "M4") == "8315126221cccde5"
    assert benchmark_fingerprint("kivi", "m/x", 8192, 1) == "d57404ca087713e3"


@given(st.text(), st.text(), st.integers(), st.integers())
def test_an_unknown_chip_is_no_part_of_the_id(method: str, model_id: str, context: int, batch: int) -> None:
    """The first 16 hex digits of SHA-1 over the parts joined by NUL."""
    joined = "\0".join((method, model_id, str(context), str(batch))).encode()
    expected = hashlib.sha1(joined, usedforsecurity=False).hexdigest()[:16]
    assert benchmark_fingerprint(method, model_id, context, batch, "unknown") == expected


def test_another_chip_is_another_id() -> None:
    """A measurement on another chip does not replace the first."""
    chips = ("unknown", "M4", "M4 Max", "Apple M4")
    assert len({benchmark_fingerprint("fp16", "m/x", 1024, 1, chip) for chip in chips}) == len(chips)


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME rules when it is an absolute path; else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_benchmark_dir() == tmp_path / "veloxquant" / "benchmarks"
    for useless in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert default_benchmark_dir() == Path.home() / ".cache" / "veloxquant" / "benchmarks"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_benchmark_dir() == Path.home() / ".cache" / "veloxquant" / "benchmarks"
    monkeypatch.setenv("HOME", "relative")
    assert default_benchmark_dir().is_absolute()

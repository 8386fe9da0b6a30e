"""The store under fire, in the short form of bench/store_faults.py, which `make faults` runs in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import store_faults

if TYPE_CHECKING:
    from pathlib import Path


def test_r34_a_full_disk_and_a_read_only_one_leave_the_store_as_it_was(directory: Path) -> None:
    """On a real file system of 1 MB: typed errors with a way out, every file and the memory as before."""
    directory.mkdir()
    said = store_faults.disk(directory, 0)
    if said.startswith("NOT RUN"):
        pytest.skip(said)
    assert "No space left on device" in said
    assert "5 kinds of write refused" in said


def test_r25_kills_amid_every_kind_of_write(directory: Path) -> None:
    """Add, upsert, remove and clear: what was acknowledged is there, nothing is torn or left over."""
    assert store_faults.kills(directory, 15).startswith("15 kills")


def test_erasing_amid_adds_brings_nothing_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes add while one removes and clears."""
    monkeypatch.setattr(store_faults, "EACH", 40)
    assert store_faults.erasing(directory, 0).startswith("160 added")

"""Processes that were left behind, found and ended by whoever adopted them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from veloxquant.methods import orphans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's children")


def test_a_child_that_may_not_be_killed_is_left_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as another user (sudo); a wait for it could last for ever."""
    with subprocess.Popen(["sleep", "60"]) as child:
        asked: list[int] = []

        def refusing(pid: int, _: int) -> None:
            asked.append(pid)
            raise PermissionError

        known = set(orphans._children()) - {child.pid}
        monkeypatch.setattr(os, "kill", refusing)
        orphans.end(known)
        monkeypatch.undo()
        assert asked == [child.pid]
        assert child.poll() is None
        orphans.end(known)
        assert child.pid not in orphans._children()


def test_children_that_have_ended_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are collected on the way; without any child at all there is nothing to count."""

    def nobody(*_: int) -> tuple[int, int]:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", nobody)
    assert orphans.left() == 0
    answers = iter([(7, 0), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(answers))
    assert orphans.left() >= 1, "one has ended, another runs"

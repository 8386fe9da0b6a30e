"""A start for which the system has no more files, memory or threads."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from veloxquant.daemon import lifecycle, main
from veloxquant.daemon.scarcity import is_starved

if TYPE_CHECKING:
    from pathlib import Path

WANTS = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError("can't start new thread"),
    MemoryError(),
]


def failing(failure: Exception) -> object:
    """A stand-in that raises it, whatever it is asked."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    return fail


@pytest.mark.parametrize("failure", WANTS, ids=repr)
def test_a_start_that_the_system_starves_says_so(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines with the way out, and no traceback."""
    monkeypatch.setattr(main, "run", failing(failure))
    assert main.main([]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert (str(failure) or "out of memory") in said[0]
    assert "ulimit" in said[1]


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "an error"), RuntimeError("a bug")], ids=repr)
def test_whatever_else_fails_is_not_called_a_want(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback is what a report needs."""
    assert not is_starved(failure)
    monkeypatch.setattr(main, "run", failing(failure))
    with pytest.raises(type(failure)) as raised:
        main.main([])
    assert raised.value is failure


def test_a_lock_for_which_there_is_no_descriptor_is_not_called_wrong(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To move the file away would mend nothing."""
    monkeypatch.setattr(lifecycle.os, "open", failing(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        lifecycle.Lock(short_folder / "d.sock.lock")

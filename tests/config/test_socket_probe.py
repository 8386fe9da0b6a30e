"""Whether somebody listens: a refusal or nothing there says no, all else says yes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from veloxquant import socket_probe

if TYPE_CHECKING:
    from pathlib import Path


def test_nobody_answers_where_nothing_lies(short_folder: Path) -> None:
    """And the reason is the system's."""
    place = short_folder / "s"
    assert isinstance(socket_probe.failure(place), FileNotFoundError)
    assert not socket_probe.answers(place)


def test_nobody_answers_on_what_a_dead_program_left(short_folder: Path) -> None:
    """Its file stays behind, and a knock on it is refused."""
    place = short_folder / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    assert isinstance(socket_probe.failure(place), ConnectionRefusedError)
    assert not socket_probe.answers(place)


def test_a_listener_answers_though_it_accepts_nobody(short_folder: Path) -> None:
    """The knock is free; once the queue is full it fails, and still somebody listens."""
    place = short_folder / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(place))
        live.listen(0)
        assert socket_probe.failure(place) is None
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            one.settimeout(0)
            one.connect_ex(str(place))
        assert socket_probe.failure(place, patience_s=0.01) is not None
        assert socket_probe.answers(place)
        for one in waiting:
            one.close()


def test_what_cannot_be_told_counts_as_somebody(short_folder: Path) -> None:
    """A path that leads through a file proves nothing about listeners."""
    (short_folder / "file").write_text("")
    assert socket_probe.answers(short_folder / "file" / "s")

"""What bench/mutation.py relies on: files that are there, and ids of tests that name the same test each time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mutation

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def given_ids(item: pytest.Item) -> str:
    """The id of a test whose parameters were given theirs, else nothing: those that pytest makes are made anew."""
    call = getattr(item, "callspec", None)
    given = any(mark.kwargs.get("ids") for mark in item.iter_markers("parametrize"))
    return str(call.id) if call is not None and given else ""


def doubled(text: str) -> str:
    """What pytest makes of an id that it escaped before: it keeps them with the mark, and escapes them again."""
    return text.encode("unicode_escape").decode("ascii")


def test_ids_are_the_same_at_a_second_collection(request: pytest.FixtureRequest) -> None:
    """One process collects twice and more there, and a test that is not found again ends the run: exit code 4.

    Told of what this run collected: all of it, when the whole suite runs.
    """
    rooms = tuple(f"{tests}/" for room in mutation.ROOMS.values() for tests in room.tests)
    given = {item.nodeid: given_ids(item) for item in request.session.items if item.nodeid.startswith(rooms)}
    assert [node for node, text in given.items() if doubled(text) != text] == []


def test_what_is_changed_is_there() -> None:
    """A file that was renamed would drop out of the sample, and the score would hide it."""
    for room in mutation.ROOMS.values():
        for pattern in (*room.changed, *room.tests):
            assert list(ROOT.glob(pattern)), pattern

"""Files whose names others chose: read if they are plain and short enough, refused at once if they are not."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from veloxquant import plain_file

if TYPE_CHECKING:
    from pathlib import Path


def test_a_plain_file_is_read_up_to_a_length(tmp_path: Path) -> None:
    """All of it, or an error: never a beginning that passes for the whole."""
    place = tmp_path / "file"
    place.write_bytes(b"12345")
    assert plain_file.read(place, 5) == b"12345"
    with pytest.raises(plain_file.TooLong) as caught:
        plain_file.read(place, 4)
    assert str(caught.value) == f"{place} is longer than 4 bytes"
    assert caught.value.strerror == "it is longer than 4 bytes"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe"])
def test_what_is_not_plain_is_told_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody writes to makes nobody wait; the error says it with and without the name."""
    place = tmp_path / "there"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    {"folder": place.mkdir, "pipe": lambda: pipe.rename(place), "link to a pipe": lambda: place.symlink_to(pipe)}[
        kind
    ]()
    with pytest.raises(plain_file.NotPlain) as caught:
        plain_file.open_plain(place)
    assert str(caught.value) == f"{place} is not a regular file"
    assert caught.value.strerror == "it is not a regular file"


def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    """Whoever made the link chose another file than the one that was named."""
    place, link = tmp_path / "file", tmp_path / "link"
    place.write_bytes(b"there")
    link.symlink_to(place)
    assert plain_file.read(link, 10) == b"there"
    with pytest.raises(OSError) as caught:  # noqa: PT011 -- the number tells
        plain_file.open_plain(link, follow_link=False)
    assert caught.value.errno == errno.ELOOP


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Not even after a refusal: the next file gets the same descriptor."""
    (tmp_path / "file").write_bytes(b"")
    before = os.open(tmp_path, os.O_RDONLY)
    os.close(before)
    with pytest.raises(plain_file.NotPlain):
        plain_file.open_plain(tmp_path)
    with plain_file.open_plain(tmp_path / "file") as file:
        assert file.fileno() == before

"""Notes of a profile: each names its method, and is there only where it is true."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from profile_kit import made_up

from veloxquant.ctl import profile_html, profile_show
from veloxquant.ctl.profile_notes import notes

if TYPE_CHECKING:
    from veloxquant.ctl.profile_result import Profile

PLAIN = made_up(["fp16", "affine4-g64"])
"""1,000 tokens of prompt and 24 of text."""


def changed(run: dict[str, Any] | None = None, found: dict[str, Any] | None = None, **facts: Any) -> Profile:
    """The plain profile with other facts of its second run, its comparison, or itself."""
    own, packed = PLAIN.found.runs
    runs = (own, msgspec.structs.replace(packed, **(run or {})))
    comparison = msgspec.structs.replace(PLAIN.found, **{"runs": runs, **(found or {})})
    return msgspec.structs.replace(PLAIN, found=comparison, **facts)


def test_a_plain_profile_has_none() -> None:
    """Nothing is to be known."""
    assert notes(PLAIN) == []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"same_when_profiled": False}, ["another text when profiled"]),
        ({"reported_bytes": 7}, ["reports 7 bytes and holds 4,194,304"]),
        ({"text_tokens": 5}, ["ended its text after 5 of 24 tokens", "fed on"]),
        (
            {"allocated_bytes": 5_000_000, "allocator_agrees": False},
            ["holds 4,194,304 bytes of arrays", "gave out 5,000,000", "views keep larger arrays", "once a process"],
        ),
        ({"allocated_bytes": 2_000_000, "allocator_agrees": False}, ["gave out 2,000,000", "counted twice"]),
    ],
)
def test_what_is_odd_about_a_method_is_told(run: dict[str, Any], words: list[str]) -> None:
    """In one sentence that begins with the method."""
    (note,) = notes(changed(run))
    assert note.startswith("affine4-g64 ")
    assert [word for word in words if word not in note] == []


@pytest.mark.parametrize(("positions", "told"), [(1023, True), (1024, False), (None, False)])
def test_a_prompt_beyond_the_models_positions_is_told(positions: int | None, *, told: bool) -> None:
    """1,000 + 24 tokens need 1,024 positions; a model that states none is not judged."""
    found = notes(changed(max_position=positions))
    assert [note for note in found if "1,000 + 24 tokens are more than the 1,023 positions" in note] == found
    assert bool(found) is told


def test_lengths_are_those_that_were_run() -> None:
    """A text that ended by itself is told with what it might have had."""
    assert profile_show.about(PLAIN).endswith("1,000 + 24 tokens")
    longer = msgspec.structs.replace(PLAIN, found=msgspec.structs.replace(PLAIN.found, max_tokens=100))
    assert "1,000 + 24 tokens (of at most 100" in profile_show.about(longer)


def test_matrices_of_the_process_are_told_once() -> None:
    """Only where there are any, on the page as well."""
    assert profile_show.matrices(PLAIN) is None
    assert "matrices" not in profile_html.page(PLAIN)
    held = changed(found={"process_bytes": 96 * 1024})
    assert str(profile_show.matrices(held)).startswith("96 KiB, held once per process, whatever the layers")
    assert profile_html.page(held).count("held once per process") == 1


@pytest.mark.parametrize(
    ("at", "words"), [(0, "differs at token 1"), (23, "differs at token 24"), (24, "same as fp16")]
)
def test_a_text_differs_where_the_tokens_do(at: int, words: str) -> None:
    """Counted from 1, over the same number of tokens."""
    tokens = tuple(range(at)) + tuple(range(100, 124 - at))
    found = changed({"tokens": tokens})
    assert profile_show.agreement(found, found.found.runs[1]) == words


def test_a_note_on_the_page_is_no_failure() -> None:
    """It has a quiet style of its own; what failed is marked."""
    page = profile_html.page(changed({"text_tokens": 5}))
    assert page.count('<p class="note">affine4-g64 ended its text') == 1
    assert page.count('<p class="bad">broken-x failed') == page.count('class="bad"') == 1

"""docs/architecture.md shows the tree as it is: its code map is the import order that is checked, room by room."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def rooms() -> set[str]:
    """Modules and packages of ours that others may import; those with an underscore are their neighbour's own."""
    found = [
        *(ROOT / "veloxquant").glob("*.py"),
        *(path.parent for path in (ROOT / "veloxquant").glob("*/__init__.py")),
    ]
    return {path.stem for path in found if not path.stem.startswith("_")}


def code_map() -> list[set[str]]:
    """The rooms of each line of the map, from the top."""
    (block,) = re.findall(r"^```\n(ctl .*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    first_column = [re.split(r"\s{2,}", line)[0] for line in block.splitlines()]
    return [set(re.findall(r"\w+", names)) for names in first_column]


def layers() -> list[set[str]]:
    """The rooms of each layer of the import contract that are there, from the top."""
    (contract,) = [one for one in CONTRACTS if one["type"] == "layers"]
    found = [{name for name in re.findall(r"\w+", line) if name in rooms()} for line in contract["layers"]]
    return [names for names in found if names]


def test_the_code_map_is_the_import_order() -> None:
    """Each line of the map is a layer that import-linter holds, in the same order, and no room is missing."""
    assert code_map() == layers()
    assert set().union(*code_map()) == rooms()


def test_every_room_says_what_holds_in_it() -> None:
    """Packages have a line of their own under "What holds in each room"."""
    _, _, section = TEXT.partition("## What holds in each room")
    packages = {path.parent.name for path in (ROOT / "veloxquant").glob("*/__init__.py")}
    described = set(re.findall(r"^- `(\w+)`:", section, flags=re.MULTILINE))
    assert packages <= described <= rooms()


def test_every_file_that_is_named_exists() -> None:
    """Paths in code type lead to files of the tree."""
    named = re.findall(r"`((?:\w+/)+[\w.*]*)`", TEXT)
    assert named
    assert {name for name in named if not any([*ROOT.glob(name), *(ROOT / "veloxquant").glob(name)])} == set()


@pytest.mark.parametrize("number", range(1, len(DECISIONS) + 1))
def test_decisions_are_numbered_without_gap_or_clash(number: int) -> None:
    """The file's number is the heading's, and each has a status."""
    (decision,) = [path for path in DECISIONS if path.name.startswith(f"{number:04}-")]
    text = decision.read_text(encoding="utf-8")
    assert text.startswith(f"# {number}. ")
    assert re.search(r"^Status: (accepted|superseded)", text, flags=re.MULTILINE)

"""docs/threat-model.md: every test that it names is there, and no way of attack is without one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_test_that_is_named_exists() -> None:
    """File and function."""
    missing = [name for file, name in NAMED if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert NAMED
    assert missing == []


def test_every_way_of_attack_has_a_test() -> None:
    """Each row of a table ends with what shows it."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| way |")]
    assert rows
    assert [row for row in rows if "`tests/" not in row.rstrip("| ").rpartition("|")[2]] == []

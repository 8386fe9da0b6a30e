"""What the README shows is what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from veloxquant.ctl.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def sessions() -> list[tuple[str, str]]:
    """Commands of ours with the output shown below them."""
    blocks = re.findall(r"```console\n\$ (veloxquantctl (?:.*\\\n)*.*)\n((?!\$)[^`]+)```", README)
    return [(command.replace("\\\n", " "), shown) for command, shown in blocks]


def test_there_is_a_session() -> None:
    """The README shows at least one answer."""
    assert sessions() != []


@pytest.mark.parametrize(("command", "shown"), sessions())
def test_the_readme_shows_what_is_printed(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as it stands in the README, the command prints what stands below it."""
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown

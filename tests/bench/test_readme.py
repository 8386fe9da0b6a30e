"""What the README shows is what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from veloxquant.ctl.main import main

if TYPE_CHECKING:
    import subprocess

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


_VARIES = (
    (r"(?m)^(\[\d+/\d+), [^\]]+\]", r"\1, TIME]"),
    (r" +[\d.]+ [KMGT]iB left", " SIZE left"),
    (r"speed not known|[\d,.]+ tok/s \(\w+\)", "SPEED"),
    (r"[\d,.]+ tok/s measured", "SPEED measured"),
    (r"\b[0-9a-f]{16}\b", "RECORD"),
    (r"generation \d+ -> \d+ after .+", "generation N -> N after TIME"),
)
"""What another machine, or another moment, makes different: times, free memory, speeds, a record's id."""


def masked(text: str) -> str:
    """The same text with a word for each figure that varies."""
    for pattern, word in _VARIES:
        text = re.sub(pattern, word, text)
    return text


def demo_block() -> str:
    """What the README shows of the demo."""
    (block,) = re.findall(r"```text\n(\[\d+/\d+, [^`]+)```", README)
    return str(block)


@pytest.mark.timeout(300)
def test_the_readme_shows_what_the_demo_prints(demo_run: subprocess.CompletedProcess[str]) -> None:
    """Choices, reasons, bytes and text of the block are those of a run; times, free memory and speeds are its own."""
    assert masked(demo_block()) in masked(demo_run.stdout)


def test_what_is_masked_is_only_what_varies() -> None:
    """A reason, a count, a label, a size of a cache or an answer that is another one is seen."""
    block = demo_block()
    assert "SPEED" in masked(block)
    for shown in (r"width_not_divisible", r": 6", r"affine8-g64", r"11\.2 MiB", r"is Paris", r"KL 0\.00041"):
        changed = re.sub(shown, "other", block, count=1)
        assert changed != block
        assert masked(changed) != masked(block)

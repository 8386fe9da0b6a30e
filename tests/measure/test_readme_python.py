"""The README's Python runs as it stands, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_model

if TYPE_CHECKING:
    import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One block after the other in one session; the last prints two packed layers."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    folder = str(tiny_model.save(tmp_path / "model"))
    session: dict[str, Any] = {}
    for block in blocks:
        shorter = re.sub(r"max_tokens=\d+", "max_tokens=4", block)
        exec(compile(shorter.replace("path/to/model", folder), "README.md", "exec"), session)  # noqa: S102 -- our own
    assert session["plan"].chosen is not None
    assert [type(cache).__name__ for cache in session["caches"]] == ["PackedKVCache"] * tiny_model.LAYERS
    # "Hello" is 5 tokens, and each of the four that are generated is fed: mlx-lm computes one ahead.
    assert re.search(r"^Sequence tokens: +9$", capsys.readouterr().out, re.MULTILINE)

"""One other process (`loader.py`) for all prompts of a run that are saved here and loaded there."""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_process: subprocess.Popen[str] | None = None


class Answer(NamedTuple):
    """What the other process found; `error` is what it raised, else None."""

    logits: Any
    nbytes: list[int]
    error: str | None


def load(file: str, architecture: str, tokens: Sequence[int], packed: Sequence[int]) -> Answer:
    """Load the saved list there and give its model the tokens; logits (tokens, vocabulary), bytes of packed entries."""
    import mlx.core as mx

    asked = {"file": file, "architecture": architecture, "tokens": list(tokens), "packed": list(packed)}
    process = _started()
    stdin, stdout = _pipes(process)
    with contextlib.suppress(BrokenPipeError):
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
    line = stdout.readline()
    if not line:
        stop()
        return Answer(None, [], f"the process that loads it ended with code {process.wait()}")
    answer = json.loads(line)
    if answer["error"] is not None:
        return Answer(None, [], answer["error"])
    found: Any = mx.load(logits_of(file))
    return Answer(found["logits"], answer["nbytes"], None)


def stop() -> None:
    """End the process, if there is one. The next `load` starts another."""
    global _process  # noqa: PLW0603 -- one for a run
    if _process is not None:
        for pipe in _pipes(_process):
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()
        _process.wait()
        _process = None


def _started() -> subprocess.Popen[str]:
    global _process  # noqa: PLW0603 -- one for a run
    if _process is None:
        command = [sys.executable, "-m", f"{__package__}.loader"]
        pipe = subprocess.PIPE
        _process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603 -- a file of ours
        atexit.register(stop)
    return _process


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None  # noqa: S101 -- both were asked for
    assert process.stdout is not None  # noqa: S101
    return process.stdin, process.stdout


def logits_of(file: str) -> str:
    """The file beside a saved prompt to which the other process writes."""
    return str(Path(file).with_suffix(".logits.safetensors"))

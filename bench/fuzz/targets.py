"""Every target of the fuzzer by name, and where its corpus lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuzz import file_targets, wire_targets

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "data" / "corpus"

TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": wire_targets.frames,
    "request": wire_targets.request,
    "params": wire_targets.params,
    "answer": wire_targets.answer,
    "planning": wire_targets.planning,
    "config": file_targets.config,
    "environment": file_targets.environment,
    "record": file_targets.record,
    "import": file_targets.import_,
    "listing": file_targets.listing,
    "model": file_targets.model,
    "weights": file_targets.weights,
    "calibration": file_targets.calibration,
    "plan": file_targets.plan,
    "trace": file_targets.trace,
}


def corpus(target: str) -> list[Path]:
    """The kept inputs of a target: seeds, what reached new code, and everything that was ever a find."""
    return sorted((CORPUS / target).iterdir())

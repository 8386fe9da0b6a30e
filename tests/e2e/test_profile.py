"""What `profile --record` measured changes the running daemon's next plan."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import tiny_model
from tiny_model import FLOAT_SLOT, LAYERS, PACKED_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable

FORCED = ("--max-kl", "100", "--objective", "memory", "--method", "fp16", "affine4-g64")
"""Both stay candidates, whatever their quality, and whatever pace so short a run on a busy machine has."""
PROMPT = "x" * 300
"""300 tokens, since the tokenizer makes one of each byte; with 8 more they take 512 slots."""


def test_the_next_plan_cites_what_was_profiled(ask: Callable[..., Any], running: Any, tmp_path: Path) -> None:
    """Records of both methods are cited for memory and speed, and the bytes promised are the bytes measured."""
    folder = str(tiny_model.save(tmp_path / "tiny-profiled"))
    question = ("plan", "--model", folder, "--context", "300", "--generate", "8", *FORCED)
    before = labels(ask(*question).value)
    assert {one["speed"]["evidence"]["source"] for one in before.values()} & {"measured"} == set()
    words = ("--model", folder, "--prompt", PROMPT, "--max-tokens", "8", "--method", "affine4-g64")
    done = ask("profile", *words, "--record", "--records", str(running.records))
    assert done.code == 0
    ids = dict(zip(("fp16", "affine4-g64"), done.value["records"], strict=True))
    runs = {one["label"]: one for one in done.value["runs"]}
    after = cited(ask, question, set(ids.values()))
    for label, slot in (("fp16", FLOAT_SLOT), ("affine4-g64", PACKED_SLOT)):
        one = after[label]
        assert one["memory"]["evidence"]["record_ids"] == [ids[label]]
        assert one["memory"]["stored_bytes"] == runs[label]["resident_bytes"] == LAYERS * 512 * slot
        assert one["speed"]["evidence"]["source"] == "measured"
        assert one["speed"]["evidence"]["record_ids"] == [ids[label]]
        assert abs(one["speed"]["latency_ms_per_token"] / runs[label]["ms_per_token"] - 1) < 0.01


def labels(plan: dict[str, Any]) -> dict[str, Any]:
    """The candidates of a plan by their labels."""
    return {one["label"]: one for one in [plan["chosen"], *plan["alternatives"]] if one is not None}


def cited(ask: Callable[..., Any], question: tuple[str, ...], ids: set[str]) -> dict[str, Any]:
    """The candidates, once their speeds cite these records; the watcher needs a moment, and its slowest path 10 s."""
    ends = time.monotonic() + 20
    while True:
        found = labels(ask(*question).value)
        if ids <= {key for one in found.values() for key in one["speed"]["evidence"]["record_ids"]}:
            return found
        assert time.monotonic() < ends, found
        time.sleep(0.1)

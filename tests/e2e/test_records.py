"""A measurement dropped into the directory changes the running daemon's next plan."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

if TYPE_CHECKING:
    from collections.abc import Callable

# 27 layers of 2 heads of 128: 27 x 2 x 128 x 2 x 2 bytes = 27 KiB a token.
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 27,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
KIB = 1024
MACHINE = ("--chip", "Apple M2", "--memory", "16GiB", "--working-set", "11.8GiB", "--active", "0")


def test_a_record_wins_over_the_trace(ask: Callable[..., Any], inline: Callable[..., str], running: Any) -> None:
    """237 KB a token measured where the trace says 27: used, named, and the fitting context falls by it."""
    config = inline("small", SMALL)
    question = ("plan", "--config", config, "--weights", "64MiB", "--context", "8k", "--generate", "0", *MACHINE)
    before = ask(*question).value["chosen"]
    assert (before["label"], before["memory"]["bytes_per_token"]) == ("fp16", 27 * KIB)
    database = BenchmarkDatabase(running.records)
    try:
        record = database.add(
            method="fp16",
            model_id="small",
            architecture="llama",
            context_length=8192,
            memory_bytes=237 * KIB * 8192,
            throughput_tok_s=20.0,
            latency_ms_per_token=50.0,
            chip="Apple M2",
            mlx_version="0.32.4",
        )
    finally:
        database.close()
    own = eventually(lambda: fp16_of(ask(*question).value), lambda one: one["memory"]["evidence"]["record_ids"])
    assert own["memory"]["evidence"]["source"] == "measured"
    assert own["memory"]["evidence"]["record_ids"] == [record.id]
    assert own["memory"]["stored_bytes"] == 237 * KIB * 8192
    ratio = before["fit"]["max_context_tokens"] / own["fit"]["max_context_tokens"]
    assert ratio == pytest.approx(237 / 27, rel=0.02)
    page = ask("records", "--model", "small").value
    assert [(one["id"], one["method"]) for one in page["records"]] == [(record.id, "fp16")]


def test_a_file_that_is_no_record_is_shown_as_skipped(ask: Callable[..., Any], running: Any) -> None:
    """It is not used, it harms nothing, and `records --skipped` says why."""
    folder = running.records / "records"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "broken.json").write_text('{"id": "broken"')
    page = eventually(lambda: ask("records", "--skipped").value, lambda found: found["skipped"])
    assert [(one["file"].endswith("broken.json"), bool(one["reason"])) for one in page["skipped"]] == [(True, True)]
    (folder / "broken.json").unlink()
    eventually(lambda: ask("records", "--skipped").value, lambda found: not found["skipped"])


def fp16_of(plan: dict[str, Any]) -> dict[str, Any]:
    """The engine's own cache in a plan, chosen or not."""
    return next(one for one in [plan["chosen"], *plan["alternatives"]] if one["label"] == "fp16")


def eventually(look: Callable[[], Any], good: Callable[[Any], Any]) -> Any:
    """Look until it is good; the watcher needs a moment, and its slowest path 10 seconds."""
    ends = time.monotonic() + 20
    while True:
        found = look()
        if good(found) or time.monotonic() > ends:
            assert good(found)
            return found
        time.sleep(0.1)

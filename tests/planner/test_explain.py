"""Sentences carry the arithmetic, and the plan's facts are in one order."""

from __future__ import annotations

import msgspec
import pytest
from planner_kit import ask, deepseek_v3, llama_8b, mac, qwen35_27b, record, windowed

from veloxquant.errors import InvalidParams
from veloxquant.planner.explain import explain
from veloxquant.planner.result import Plan


def _text(answer: Plan, label: str | None = None) -> str:
    return "\n".join(explain(answer, label)).replace("\N{MULTIPLICATION SIGN}", "x")


def test_bytes_are_explained_factor_by_factor() -> None:
    """32 layers, 8 heads, width 128, K and V, bits, slots."""
    answer = ask(llama_8b(), mac(16, 11.8), context_length=131072)
    text = _text(answer)
    assert "32 layers x 8 heads x 128 x 2 (K, V) x 4.5 bits x 131,072 slots / 8 = 4.5 GiB (packed)" in text
    assert "quantize: affine4-g64" in text
    assert "affine8-g64 fits a context of" in text
    assert "131,072 bytes more" not in text


def test_a_latent_cache_shows_both_widths() -> None:
    """512 for the latent, 64 for the rope key, one head."""
    text = _text(ask(deepseek_v3(), mac(512, 400), context_length=100_000))
    assert "61 layers x 1 head x (512 x 16 (K) + 64 x 16 (V)) bits x 100,096 slots / 8" in text


def test_states_and_windows_are_shown_apart() -> None:
    """What does not grow is named."""
    assert "48 layers x 1,000 B of state" in _text(ask(qwen35_27b(1000), mac(64))).replace("1000 B", "1,000 B")
    assert "(window)" in _text(ask(windowed(), mac(64)))
    assert "20 layers keep the engine's sliding window" in _text(ask(windowed(), mac(64), max_kl=10), "affine8-g64")


def test_a_record_is_cited() -> None:
    """By id, and that it wins."""
    seen = record("fp16", latency_ms_per_token=60.0, memory_bytes=2**31)
    text = _text(ask(llama_8b(), mac(64), context_length=8192, records=[(0.9, seen)]))
    assert f"by record {seen.id}; the record wins over the arithmetic" in text
    assert f"measured by record {seen.id}, confidence high (0.90)" in text


def test_a_rejected_variant_is_explained_by_its_reason() -> None:
    """With the bytes it is short by."""
    answer = ask(llama_8b(), mac(16, 11.8), context_length=131072)
    text = _text(answer, "fp16")
    assert "does_not_fit" in text
    assert "short by" in text


def test_no_plan_is_explained_by_every_rejection() -> None:
    """Nothing fits: each variant says why, and what would work follows."""
    text = _text(ask(llama_8b(), mac(16, 11.8), context_length=10**7))
    assert "no_fit" in text
    assert text.count("does_not_fit") == 7
    assert "smaller_weights" not in text


def test_an_unknown_label_is_refused_by_name() -> None:
    """With the labels there are."""
    with pytest.raises(InvalidParams) as caught:
        explain(ask(llama_8b(), mac(64)), "nope")
    assert caught.value.field == "label"
    assert "fp16" in caught.value.hint


def test_a_plan_read_back_from_json_explains_the_same() -> None:
    """The sentences need nothing but the plan."""
    for answer in (ask(llama_8b(), mac(64)), ask(windowed(), mac(64), objective="memory")):
        back = msgspec.json.decode(msgspec.json.encode(answer), type=Plan)
        assert explain(back) == explain(answer)


def test_the_facts_do_not_depend_on_the_order_of_mappings() -> None:
    """Sources given in another order give the same bytes, id included."""
    one = ask(llama_8b(), mac(64, sources={"chip": "x", "backend": "y"}))
    two = ask(llama_8b(), mac(64, sources={"backend": "y", "chip": "x"}))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


def test_the_id_depends_on_what_was_asked() -> None:
    """Model, workload, machine and budget each."""
    machine = mac(64)
    ids = {
        ask(llama_8b(), machine).plan_id,
        ask(llama_8b(weights_bytes=1), machine).plan_id,
        ask(llama_8b(), mac(65)).plan_id,
        ask(llama_8b(), machine, budget=2**30).plan_id,
        ask(llama_8b(), machine, context_length=1).plan_id,
        ask(llama_8b(), machine, methods=("fp16",)).plan_id,
    }
    assert len(ids) == 6

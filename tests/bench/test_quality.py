"""bench/quality.py: the frontier, what is reached at a budget, and a real comparison on a few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import quality
import quality_plot
import teacher_forced
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 96


def row(label: str, bits: float, kl: float) -> dict[str, Any]:
    """As a candidate leaves it."""
    return {"label": label, "bits": bits, "kl_mean": kl}


class _Tokens:
    """A text of numbers."""

    digest = "numbers"

    def __init__(self, count: int) -> None:
        self.ids = [(7 * at * at + 3) % 101 for at in range(count)]


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers, four heads over two of width 64."""
    mx.random.seed(5)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=101,
    )
    made = llama.Model(args)
    mx.eval(made.parameters())
    return made


@pytest.fixture
def known(model: Any, tmp_path: Path) -> Any:
    """The reference of the model."""
    return teacher_forced.reference(model, _Tokens(TOKENS), tmp_path)  # type: ignore[arg-type]


def test_a_row_that_another_beats_in_both_is_not_on_the_frontier() -> None:
    """Fewer bits and less divergence win; each step up in bits must pay."""
    rows = [row("a", 4.0, 0.1), row("b", 3.0, 0.2), row("c", 4.5, 0.15), row("d", 5.0, 0.05), row("e", 3.0, 0.3)]
    assert [one["label"] for one in quality_plot.frontier(rows)] == ["b", "a", "d"]


def test_a_budget_is_reached_by_the_best_row_within_it() -> None:
    """Two decimals of bits count; what is over the budget does not."""
    rows = [row("over", 4.51, 0.001), row("just", 4.504, 0.02), row("less", 3.0, 0.5)]
    assert quality_plot.reached(rows, 4.5) == rows[1]
    assert quality_plot.reached(rows, 2.5) is None


def test_the_reference_diverges_from_itself_by_nothing(model: Any, known: Any) -> None:
    """The engine's own float32 cache, read again; 16 bits of K and V cost next to nothing."""
    text: Any = _Tokens(TOKENS)
    found = teacher_forced.compare(model, text, known, "same", lambda: [quality._Half() for _ in model.layers])
    assert found.kl_mean < 1e-5
    assert found.top1 > 0.98
    # A buffer of 256 slots (the engine's step), 2 bytes a number, over the K and V numbers of 96 tokens.
    assert found.bits == pytest.approx(16 * 256 / TOKENS)


def test_a_candidate_is_compared_as_numpy_compares_it(model: Any, known: Any) -> None:
    """KL, its 99th percentile, top tokens and perplexity by their definitions, from one plain call."""
    text: Any = _Tokens(TOKENS)

    def caches() -> list[Any]:
        return [QuantizedKVCache(bits=4, group_size=32) for _ in model.layers]

    found = teacher_forced.compare(model, text, known, "four", caches)
    made = caches()
    for cache in made:
        teacher_forced._hand_over_half(cache)
    logits = np.array(model(mx.array(text.ids)[None], cache=made)[0]).astype(np.float64)
    told = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    reference = np.array(known, dtype=np.float64)
    kl = (np.exp(reference) * (reference - told)).sum(axis=-1)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert found.top1 == pytest.approx((told.argmax(-1) == reference.argmax(-1)).mean())
    following = told[np.arange(TOKENS - 1), text.ids[1:]]
    assert found.perplexity == pytest.approx(np.exp(-following.mean()), rel=1e-4)


def test_products_of_dequantized_numbers_are_the_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--products dequantized` changes who multiplies, and nothing else."""
    x, w = mx.random.normal((2, 3, 64)), mx.quantize(mx.random.normal((2, 5, 64)), group_size=32, bits=4)
    native = mx.quantized_matmul(x, *w, transpose=True, group_size=32, bits=4)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)  # put back afterwards
    quality._take_products_from_dequantized()
    taken = mx.quantized_matmul(x, *w, transpose=True, group_size=32, bits=4)
    assert np.allclose(np.array(native), np.array(taken), atol=1e-4)


def test_the_table_marks_the_frontier_and_says_what_is_reached() -> None:
    """One line a row, one a target."""
    rows = [
        {**row("good", 4.0, 0.01), "kl_p99": 0.1, "top1": 0.9, "perplexity": 10.0},
        {**row("bad", 5.0, 0.02), "kl_p99": 0.1, "top1": 0.9, "perplexity": 10.0},
    ]
    told = quality.table(rows).splitlines()
    assert told[2].startswith("| bad |")
    assert told[3].startswith("| **good** |")
    assert sum("good at 4.00" in line for line in told) == sum(bits >= 4 for bits, _ in quality.TARGETS)


def test_the_reference_is_the_engines_cache(model: Any, known: Any) -> None:
    """Chunks of the text through KVCache give the log probabilities of one call."""
    logits = model(mx.array(_Tokens(TOKENS).ids)[None], cache=[KVCache() for _ in model.layers])[0]
    told = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert np.allclose(told, np.array(known), atol=1e-4)

"""One generation: mlx-lm's own tokens, counted and timed as the planner counts them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import tiny_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from veloxquant.errors import InvalidParams
from veloxquant.measure import loading
from veloxquant.measure.generation import Generation, generate
from veloxquant.models.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path
    from types import SimpleNamespace


def go(tiny: SimpleNamespace, prompt: list[int], tokens: int, **settings: Any) -> tuple[Generation, list[Any]]:
    """One generation with the engine's own caches, and these caches."""
    caches = make_prompt_cache(tiny.model)
    return generate(tiny.model, tiny.tokenizer, prompt, caches, tokens, 128, **settings), caches


def test_tokens_are_those_of_the_engine(tiny: SimpleNamespace) -> None:
    """Greedy tokens equal those of mlx-lm's own loop, and the caches hold prompt and text."""
    found, caches = go(tiny, tiny.prompt, 12)
    expected = [token for token, _ in generate_step(mx.array(tiny.prompt), tiny.model, max_tokens=12)]
    assert list(found.tokens) == expected
    assert [cache.offset for cache in caches] == [312, 312]
    assert found.text == tiny.tokenizer.decode(expected)


def test_time_is_of_prompt_and_of_steps(tiny: SimpleNamespace) -> None:
    """Twelve tokens are eleven steps after the first: 1000 ms over tokens a second is ms a token."""
    found, _ = go(tiny, tiny.prompt, 12)
    assert found.prefill_s > 0
    assert found.ms_per_token == pytest.approx(1000 * found.decode_s / 11)
    assert found.decode_tok_s == pytest.approx(11 / found.decode_s)


def test_one_token_has_no_speed(tiny: SimpleNamespace) -> None:
    """A single token comes with the prompt: there is no step to time."""
    found, _ = go(tiny, tiny.prompt[:5], 1)
    assert len(found.tokens) == 1
    assert (found.ms_per_token, found.decode_tok_s) == (None, None)


def test_a_text_may_end_by_itself(tmp_path: Path) -> None:
    """The end-of-text token counts as generated and is in the cache, and nothing of it is in the text."""
    source = resolve(path=str(tiny_model.save(tmp_path / "ending", ends=True)))
    model = loading.load_model(source)
    caches = make_prompt_cache(model)
    found = generate(model, loading.load_tokenizer(source), [1, 2, 3], caches, 9, 128)
    assert (found.tokens, found.text) == ((0,), "")
    assert caches[0].offset == 4


def test_progress_counts_prompt_and_text(tiny: SimpleNamespace) -> None:
    """What is told never falls, and ends at all tokens."""
    told: list[int] = []
    go(tiny, tiny.prompt, 7, watch=told.append)
    assert told == sorted(told)
    assert {128, 256, 307} <= set(told)


def test_peak_is_counted_by_the_allocator(tiny: SimpleNamespace) -> None:
    """MLX held at least weights and caches at once: 2 layers x 512 slots for 300 + 3 tokens in chunks of 128."""
    found, _ = go(tiny, tiny.prompt, 3)
    assert found.before_bytes >= sum(weight.nbytes for _, weight in weights(tiny.model))
    assert found.peak_bytes - found.before_bytes >= 2 * 512 * tiny_model.FLOAT_SLOT


def weights(model: Any) -> list[tuple[str, Any]]:
    """All weights with their names."""
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


def test_an_empty_prompt_is_refused(tiny: SimpleNamespace) -> None:
    """There is nothing to continue."""
    with pytest.raises(InvalidParams, match="no tokens") as refused:
        go(tiny, [], 3)
    assert refused.value.field == "prompt"


def ending_at(tiny: SimpleNamespace, token: int) -> Any:
    """The tokenizer for which this token ends a text."""
    other = copy.copy(tiny.tokenizer)
    other.eos_token_ids = {token}
    return other


def test_a_length_can_be_kept_beyond_the_end_of_text(tiny: SimpleNamespace) -> None:
    """Just as many tokens as asked, those that a tokenizer without an end gives; the text ends where it would have."""
    endless, _ = go(tiny, tiny.prompt, 12)
    end = endless.tokens[3]
    tokenizer, at = ending_at(tiny, end), endless.tokens.index(end)
    caches = make_prompt_cache(tiny.model)
    found = generate(tiny.model, tokenizer, tiny.prompt, caches, 12, 128, stops=False)
    assert found.tokens == endless.tokens
    assert (found.text_tokens, caches[0].offset) == (at + 1, 312)
    stopped = generate(tiny.model, tokenizer, tiny.prompt, make_prompt_cache(tiny.model), 12, 128)
    assert stopped.tokens == endless.tokens[: at + 1]
    assert found.text == stopped.text == tiny.tokenizer.decode(endless.tokens[:at])
    assert tokenizer.eos_token_ids == {end}

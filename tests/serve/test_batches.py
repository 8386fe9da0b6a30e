"""Plans of batchable methods served in batches by mlx-lm itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from veloxquant.caches.held import held_bytes
from veloxquant.methods.registry import load
from veloxquant.serve.apply import apply

PROMPTS = [[(7 * i + 3) % 64 for i in range(length)] for length in (5, 300, 41)]
TOKENS = 6


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of one request."""
    made = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=model.make_cache())
    return [token for token, _ in made]


def test_a_planned_model_of_a_batchable_method_serves_batches_that_stay_packed(tiny: Any) -> None:
    """Three prompts of unlike lengths: each gets its own tokens, and the batch holds rows x bytes of the longest.

    3 bits of width 64 are 3 x 2 words of 4 bytes and a root mean square of 4: 28 bytes for K and 28 for V of a head;
    2 heads, 512 slots for 306 tokens, 3 rows.
    """
    model, methods = tiny.llama(), load(only=["turboquant"])
    method = methods.method("turboquant_mse")
    assert method.batchable
    variant = {"method": "turboquant_mse", "label": "turboquant-mse3", "params": {"bits": 3}}
    apply(model, tiny.config(model) | variant, methods=methods)
    generator = BatchGenerator(model, max_tokens=TOKENS, prefill_step_size=128)
    order = generator.insert(PROMPTS)
    told: dict[int, list[int]] = {uid: [] for uid in order}
    most = 0
    while responses := generator.next_generated():
        for one in responses:
            told[one.uid].append(one.token)
        held = [held_bytes(cache) for cache in generator._generation_batch.prompt_cache]
        most = max([most, *held])
    assert [told[uid] for uid in order] == [alone(model, prompt) for prompt in PROMPTS]
    assert most == 3 * 512 * 2 * 2 * 28

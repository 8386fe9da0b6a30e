"""TurboQuant on a real model, through mlx-lm's own generation."""

from __future__ import annotations

from typing import Any

from mlx_lm import generate
from veloxquant_plugins.turboquant import TurboQuantMSE

from veloxquant.caches.held import held_bytes
from veloxquant.methods import LayerSpec
from veloxquant.methods.checks import sample_part
from veloxquant.methods.worker import declared_bytes


def test_smollm2_answers_at_four_bits(loaded: tuple[Any, Any]) -> None:
    """All 30 layers packed from the first token: the capital of France, in the declared bytes."""
    model, tokenizer = loaded
    method = TurboQuantMSE()
    (four,) = [variant for variant in method.variants() if variant.label == "turboquant-mse4"]
    part = sample_part(64, 4, heads=3)
    caches = [method.build(LayerSpec(index=at, part=part), four) for at in range(len(model.layers))]
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    text = generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=caches)
    assert "Paris" in text
    runs = [(len(prompt), 1), (1, 16)]
    assert held_bytes(caches) == 30 * declared_bytes(method, four, part, runs)

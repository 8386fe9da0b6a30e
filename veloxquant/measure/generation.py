"""One greedy generation through mlx-lm's own loop, with the caches that are given, on the clock."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from veloxquant.errors import InvalidParams

Watch = Callable[[int], None]
"""Told how many tokens of prompt and text are done."""


@dataclass(frozen=True)
class Generation:
    """What was generated and how long it took."""

    tokens: tuple[int, ...]
    """Ids in order, an end-of-text token and what was fed on after it included: the cache holds all of them."""
    text_tokens: int
    """Tokens to the first end-of-text token, that one included; all of them where there is none."""
    text: str
    """Up to the end of text."""
    prefill_s: float
    """From the start to the first token: the whole prompt, and the sampling of one token."""
    decode_s: float
    """From the first token to the last: len(tokens) - 1 steps."""
    peak_bytes: int
    """Most that MLX held at once (active memory, weights included)."""
    before_bytes: int
    """What MLX held before the first call: the weights."""

    @property
    def ms_per_token(self) -> float | None:
        """Decode time of one token in milliseconds; None for a single token, which has no step of its own."""
        steps = len(self.tokens) - 1
        return None if steps < 1 or self.decode_s <= 0 else 1000 * self.decode_s / steps

    @property
    def decode_tok_s(self) -> float | None:
        """Decoded tokens a second, the first token not counted: 1000 / ms_per_token."""
        each = self.ms_per_token
        return None if each is None else 1000 / each


def generate(  # noqa: PLR0917 -- what mlx-lm's loop takes, in its order
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    caches: list[Any],
    max_tokens: int,
    prefill_step_size: int,
    watch: Watch | None = None,
    *,
    stops: bool = True,
) -> Generation:
    """Continue `prompt` (token ids) greedily, temperature 0, by at most `max_tokens`, filling `caches` in place.

    Ends early at an end-of-text token of the tokenizer, unless `stops` is False: then just `max_tokens` are generated,
    and only the text ends there. Raises InvalidParams for an empty prompt, and whatever the model or its caches raise.
    """
    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.generate import generation_stream

    if not prompt:
        raise InvalidParams("the prompt has no tokens", hint="give some text", field="prompt")
    told = watch or _nobody
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    tokens, ticks = [], []
    for piece in stream_generate(
        model,
        tokenizer if stops else _endless(tokenizer),
        mx.array(list(prompt)),
        max_tokens=max_tokens,
        prompt_cache=caches,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=lambda done, _total: told(done),
    ):
        ticks.append(time.perf_counter())
        tokens.append(int(piece.token))
        told(len(prompt) + len(tokens))
    mx.synchronize(generation_stream)
    mx.synchronize()
    ends = next((at for at, token in enumerate(tokens) if token in tokenizer.eos_token_ids), None)
    return Generation(
        tokens=tuple(tokens),
        text_tokens=len(tokens) if ends is None else ends + 1,
        text=_text(tokenizer, tokens[:ends]),
        prefill_s=ticks[0] - began,
        decode_s=ticks[-1] - ticks[0],
        peak_bytes=mx.get_peak_memory(),
        before_bytes=before,
    )


def _endless(tokenizer: Any) -> Any:
    """The same tokenizer as one for which no token ends a text; what it shares with the first one stays as it is."""
    other = copy.copy(tokenizer)
    other.eos_token_ids = ()
    return other


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """As mlx-lm's loop writes it."""
    writer = tokenizer.detokenizer
    for token in tokens:
        writer.add_token(token)
    writer.finalize()
    return str(writer.text)


def _nobody(_done: int) -> None:
    """Nobody watches."""

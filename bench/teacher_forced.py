"""What packing costs a real model: the same tokens through the engine's float cache and through another, compared.

SmolLM2-135M-Instruct, weights dequantized to float32, reads the first tokens of the sorted CPython pydoc topics in
chunks, and every token's whole distribution is compared: KL(reference || candidate) in nats. K and V are handed to the
candidate in 16 bits, as a 16-bit model would, so that scales, sinks and windows take the bytes they take there;
everything else is computed in float32.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from veloxquant.caches.held import held_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK = 256
"""Tokens a call."""
SLICE = 64
"""Tokens whose distributions are compared at a time."""


@dataclass(frozen=True)
class Quality:
    """One candidate against the reference, over all tokens. KL in nats a token."""

    label: str
    tokens: int
    bytes: int
    """Really held at the end: every array reachable from the caches."""
    bits: float
    """bytes over the K and V numbers of those tokens."""
    kl_mean: float
    kl_p99: float
    top1: float
    """Share of tokens whose most likely next token is the reference's."""
    perplexity: float
    drops_tokens: bool = False
    """Its bytes do not grow with the text, and what it says of a longer one is nothing."""

    def row(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


class Text:
    """The tokens that are read."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.ids: list[int] = tokenizer.encode(text[: 12 * count])[:count]
        if len(self.ids) < count:
            raise ValueError(f"the pydoc topics have only {len(self.ids)} tokens in their first {12 * count} letters")

    @property
    def digest(self) -> str:
        """Names the tokens: other Python versions have other topics."""
        return hashlib.sha256(np.array(self.ids, dtype=np.int32).tobytes()).hexdigest()[:16]


def load(folder: Path) -> tuple[Any, Any]:
    """The model with float32 weights, and its tokenizer."""
    model, _ = load_model(folder)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, load_tokenizer(folder)


def reference(model: Any, text: Text, folder: Path) -> np.ndarray[Any, Any]:
    """Log probabilities (tokens, vocabulary) with the engine's float32 cache; kept in a file beside the model."""
    path = folder / f"reference-{len(text.ids)}-{text.digest}.npy"
    if path.exists():
        return _mapped(path)
    fresh = path.with_suffix(".part.npy")
    rows = None
    for first, logits in _logits(model, text, [KVCache() for _ in model.layers]):
        if rows is None:
            shape = (len(text.ids), logits.shape[-1])
            rows = np.lib.format.open_memmap(fresh, mode="w+", dtype=np.float32, shape=shape)
        rows[first : first + logits.shape[0]] = np.array(_log_softmax(logits))
    assert rows is not None
    rows.flush()
    fresh.rename(path)
    return _mapped(path)


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    return found


def compare(
    model: Any, text: Text, known: np.ndarray[Any, Any], label: str, caches: Callable[[], list[Any]]
) -> Quality:
    """Read the text with these caches."""
    made = caches()
    for cache in made:
        _hand_over_half(cache)
    kl: list[Any] = []
    hits, surprise = 0, 0.0
    for first, logits in _logits(model, text, made):
        for start in range(0, logits.shape[0], SLICE):
            at = first + start
            candidate = _log_softmax(logits[start : start + SLICE])
            expected = mx.array(known[at : at + candidate.shape[0]])
            kl.append(mx.sum(mx.exp(expected) * (expected - candidate), axis=-1))
            hits += int(np.sum(np.array(mx.argmax(expected, axis=-1) == mx.argmax(candidate, axis=-1))))
            following = text.ids[at + 1 : at + 1 + candidate.shape[0]]
            surprise -= _told(candidate, following)
            mx.eval(kl[-1])
    for cache in made:
        vars(cache).pop("update_and_fetch", None)
    values = np.concatenate([np.array(part) for part in kl])
    held = held_bytes(made)
    return Quality(
        label=label,
        tokens=len(text.ids),
        bytes=held,
        bits=8 * held / _numbers(model, len(text.ids)),
        kl_mean=float(values.mean()),
        kl_p99=float(np.quantile(values, 0.99)),
        top1=hits / len(text.ids),
        perplexity=float(np.exp(surprise / (len(text.ids) - 1))),
    )


def _logits(model: Any, text: Text, caches: list[Any]) -> Iterator[tuple[int, Any]]:
    """(first token, logits of the chunk's tokens in float32)."""
    for first in range(0, len(text.ids), CHUNK):
        ids = mx.array(text.ids[first : first + CHUNK])[None]
        logits = model(ids, cache=caches)[0].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
        yield first, logits
        mx.clear_cache()


def _told(candidate: Any, following: list[int]) -> float:
    """Sum of the log probabilities of the tokens that really follow; the last token of the text has none."""
    if not following:
        return 0.0
    picked = candidate[mx.arange(len(following)), mx.array(following, dtype=mx.int32)]
    return float(np.array(mx.sum(picked)))


def _hand_over_half(cache: Any) -> None:
    inner = cache.update_and_fetch

    def update_and_fetch(keys: Any, values: Any) -> Any:
        return inner(keys.astype(mx.float16), values.astype(mx.float16))

    cache.update_and_fetch = update_and_fetch


def _log_softmax(logits: Any) -> Any:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _numbers(model: Any, tokens: int) -> int:
    """K and V numbers of so many tokens."""
    args = model.args
    width = args.head_dim or args.hidden_size // args.num_attention_heads
    return 2 * tokens * len(model.layers) * int(args.num_key_value_heads) * int(width)

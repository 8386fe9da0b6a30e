"""Numbers that real models make: zeros of both signs, very large and very small ones, rows that are all alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.measure.conformance.outcome import unless

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject
    from veloxquant.profiles.model import CachePart

_LARGE, _SMALL, _OUTLIER = 1e4, 1e-30, 1e6
_QUERIES_A_HEAD = 2


def attention_stays_finite(subject: Subject) -> Verdict:
    """Attention over extreme K and V, after a prompt and token by token, has no NaN and no infinity."""
    index = subject.probe.packed[0]
    part = subject.part(index)
    problems = []
    for name, number in _extremes(part, subject.prompt_tokens + 2).items():
        cache = subject.build(index, part)
        for start, stop in ((0, subject.prompt_tokens), (subject.prompt_tokens, subject.prompt_tokens + 1)):
            out = _attention(cache, part, number[:, :, start:stop])
            if not bool((abs(out) < float("inf")).all()):
                problems.append((f"finite attention over K and V that are {name}", "NaN or an infinity"))
    return unless(problems)


def _extremes(part: CachePart, tokens: int) -> dict[str, Any]:
    import mlx.core as mx

    shape = (1, part.heads, tokens, max(part.key_width, part.value_width))
    plain = mx.random.normal(shape, key=mx.random.key(3))
    first_channel = mx.arange(shape[-1]) == 0
    return {
        "zero": mx.zeros(shape),
        "negative zero": -mx.zeros(shape),
        "all alike": mx.full(shape, 0.5),
        "of 1e4": plain * _LARGE,
        "of 1e-30": plain * _SMALL,
        "small beside one channel of 1e6": mx.where(first_channel, _OUTLIER, plain),
        "zero but for some tokens": mx.where(mx.arange(tokens)[:, None] % 5 == 0, plain, 0.0),
    }


def _attention(cache: Any, part: CachePart, numbers: Any) -> Any:
    import mlx.core as mx
    from mlx_lm.models import base

    count = numbers.shape[2]
    mask = cache.make_mask(count, return_array=False, window_size=None)
    keys, values = cache.update_and_fetch(numbers[..., : part.key_width], numbers[..., : part.value_width])
    queries = mx.random.normal((1, _QUERIES_A_HEAD * part.heads, count, part.key_width), key=mx.random.key(4))
    scale = part.key_width**-0.5
    return base.scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask)

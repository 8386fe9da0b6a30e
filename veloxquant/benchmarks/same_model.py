"""Whether a record was measured on a model like the one that is asked about: same name, same size, same cache.

The only geometry that a record carries is in its figures: bytes over ratio is the 16-bit cache of its run. The model's
layers say what that may have been, as a range, since a record does not say how many of the tokens were held when the
bytes were read, nor with how much slack: from the prompt alone to the engine's whole buffers after generation. The
range is narrow for long prompts; for short ones it is wide, and they tell little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.fingerprint import known
from veloxquant.benchmarks.model_name import named_parameters, tagged_parameters

if TYPE_CHECKING:
    from veloxquant.benchmarks.records import BenchmarkRecord
    from veloxquant.profiles import CachePart, ModelProfile

SAME_CACHE_RATIO = 1.5
"""Allowed beyond the range: a copy alive at the reading, an odd prefill step, a run that went on for longer than told.
Within a family (1B, 8B, 70B) the bytes a token differ by 2.5 and more, grouped and full heads by 4 or 8."""

SAME_SIZE_RATIO = 1.1
"""Of two counts of one model: with the output matrix or without."""
_MANY = 2**40
_TOKENS = re.compile(r"tokens[=:](\d{1,9})", re.ASCII)
_ENDLESS, _WINDOWS = ("kv", "concat"), ("window", "chunked")
_16_BIT = 2
_ROUNDING = 0.005
"""A ratio of two digits may be off by this."""
# What one architecture is also called: by its class, and by the part of a seeing model that reads text.
_DECORATION = re.compile(r"(?:forcausallm|forconditionalgeneration|text)+$")
_BETWEEN_WORDS = re.compile(r"[\W_]+")


class Likeness(NamedTuple):
    """What a record tells of its model, roughly: whether it may be the asked one is decided for many at once."""

    architecture: str = ""
    """Empty for unknown, and for records that are found by it."""
    parameters: float = 0.0
    """By the tag, where the name does not say."""
    most: int | None = None
    """Half octaves of the bytes a token that its 16-bit cache may have; None where it does not tell."""
    least: int = 0


def own_likeness(record: BenchmarkRecord) -> Likeness:
    """What decides whether it is a namesake."""
    said = _said(record.architecture, record.model_id, tuple(record.tags))
    most, least = _bytes_a_token(record)
    return said if most is None else Likeness(said[0], said[1], most, least)


@lru_cache(maxsize=4096)
def _said(architecture: str, model_id: str, tags: tuple[str, ...]) -> Likeness:
    counted = None if named_parameters(model_id) is not None else tagged_parameters(tags)
    return Likeness(_architecture(architecture) if known(architecture) else "", counted or 0.0)


def likeness(own: Likeness) -> Likeness:
    """The same without what is known of all that may stand in for a model."""
    return own._replace(architecture="", parameters=0.0)


def may_be_like(like: Likeness, model: ModelProfile, near: tuple[float, float]) -> bool:
    """Whether records of this likeness may be of a model like this; `near` are the least and the most tokens."""
    if like.architecture and known(model.architecture) and like.architecture != _architecture(model.architecture):
        return False
    if _is_other_size(like.parameters, model):
        return False
    if like.most is None or not model.layers:
        return True
    cache = _cache(model)
    # Bytes a token fall as tokens grow, but for what is rounded up to a step.
    fewest, most = max(1, math.floor(near[0])), 2 * math.ceil(min(near[1], _MANY))
    least_bytes = cache.least_bytes(most) / most
    most_bytes = cache.most_bytes(fewest + cache.step - 1) / fewest
    return bool(
        least_bytes <= SAME_CACHE_RATIO * _edge(like.most + 1) and _edge(like.least) <= SAME_CACHE_RATIO * most_bytes
    )


def is_namesake(record: BenchmarkRecord, model: ModelProfile) -> bool:
    """Whether a record of this very model id is of another model: two folders called "model" hold different ones.

    It is when it tells another architecture, by its tag another parameter count, or by its figures another cache.
    """
    if known(record.architecture) and known(model.architecture):
        theirs, ours = _architecture(record.architecture), _architecture(model.architecture)
        if theirs != ours:
            return True
    counted = None if named_parameters(record.model_id) is not None else tagged_parameters(record.tags)
    return _is_other_size(counted or 0.0, model) or not has_same_cache(record, model)


def has_same_cache(record: BenchmarkRecord, model: ModelProfile) -> bool:
    """Whether the record's 16-bit cache may be one of this model; true where either does not tell it."""
    ratio = record.memory_reduction
    if not (record.memory_bytes and ratio and model.layers):
        return True
    slip = _ROUNDING if ratio == round(ratio, 2) else 0.0
    fewest, most = _tokens_held(record)
    least_bytes = _cache(model).least_bytes(fewest) * (ratio - slip) / SAME_CACHE_RATIO
    most_bytes = _cache(model).most_bytes(most) * (ratio + slip) * SAME_CACHE_RATIO
    return least_bytes <= record.memory_bytes / record.sequences <= most_bytes


def _bytes_a_token(record: BenchmarkRecord) -> tuple[int | None, int]:
    """The most and the least that the figures allow, as `Likeness` has them."""
    ratio = record.memory_reduction
    if not (record.memory_bytes and ratio):
        return None, 0
    fewest, most = _tokens_held(record)
    if not record.context_length <= fewest <= 2 * record.context_length:
        return None, 0  # its tokens are not those that are asked for
    slip = _ROUNDING if ratio == round(ratio, 2) else 0.0
    held = record.memory_bytes / record.sequences
    most_bytes = held / (ratio - slip) / fewest if ratio > slip else math.inf
    if not 0 < most_bytes < math.inf:
        return None, 0
    return _half_octave(most_bytes), _half_octave(held / (ratio + slip) / most)


def _half_octave(size: float) -> int:
    return math.floor(2.0 * math.log2(size))


def _edge(half_octave: int) -> float:
    """Where it begins."""
    return math.pow(2.0, half_octave / 2)


def _is_other_size(counted: float, model: ModelProfile) -> bool:
    size = model.num_parameters
    return bool(counted and size and max(counted, size) > SAME_SIZE_RATIO * min(counted, size))


def stated_tokens(record: BenchmarkRecord) -> int | None:
    """Tokens that were held when the bytes were read, by a "tokens=4608" tag; None where no tag says so."""
    if not record.tags:
        return None
    return next((int(found[1]) for tag in sorted(record.tags) if (found := _TOKENS.fullmatch(tag))), None) or None


def _tokens_held(record: BenchmarkRecord) -> tuple[int, int]:
    """The fewest and the most tokens that one sequence may have held when the bytes were read."""
    stated, prompt = stated_tokens(record), record.context_length
    return (stated, stated) if stated else (prompt, prompt + record.workload.generation_length)


class _Cache(NamedTuple):
    """The engine's own cache of one sequence, summed over its layers; bytes."""

    least_a_token: int
    """Of what grows for ever, with 16-bit numbers even where the model computes in 32."""
    windows: tuple[tuple[int, int], ...]
    """(window in slots, bytes a slot), likewise."""
    most_a_slot: int
    most_in_windows: int
    """Bytes a slot of all windows."""
    step: int
    states: int

    def least_bytes(self, tokens: int) -> int:
        """Without slack, windows at their length."""
        in_windows = sum(min(tokens, window) * slot_bytes for window, slot_bytes in self.windows)
        return self.states + tokens * self.least_a_token + in_windows

    def most_bytes(self, tokens: int) -> int:
        """With slack up to the next step; windows as a prompt fed in one piece and the token after it make them."""
        slots = -(-tokens // self.step) * self.step
        return self.states + slots * self.most_a_slot + (tokens + self.step) * self.most_in_windows


@lru_cache(maxsize=256)
def _cache(model: ModelProfile) -> _Cache:
    parts = [part for layer in model.layers for part in layer.parts]
    windows: Counter[int] = Counter()
    for part in parts:
        if part.kind in _WINDOWS:
            windows[part.window] += _16_bit_slot(part)
    return _Cache(
        sum(_16_bit_slot(part) for part in parts if part.kind in _ENDLESS),
        tuple(windows.items()),
        sum(part.slot_bytes for part in parts if part.kind in _ENDLESS),
        sum(part.slot_bytes for part in parts if part.kind in _WINDOWS),
        max((part.step for part in parts), default=1),
        sum(part.state_bytes for part in parts),
    )


def _16_bit_slot(part: CachePart) -> int:
    keys = part.key_width * min(part.key_itemsize, _16_BIT)
    return part.heads * (keys + part.value_width * min(part.value_itemsize, _16_BIT))


@lru_cache(maxsize=1024)
def _architecture(name: str) -> str:
    """Form in which two spellings of one architecture are equal: "Qwen2MoeForCausalLM" and "qwen2_moe"."""
    return _DECORATION.sub("", _BETWEEN_WORDS.sub("", name.casefold()))

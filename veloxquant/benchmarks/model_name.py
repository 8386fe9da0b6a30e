"""What a model's id says about its size and the bits of its weights.

Used for one purpose: a record of one model may stand in for another of the same architecture only when both are known
to have the same size and the same weight bits. What the name does not say is unknown, and unknown matches nothing.
Two sizes are one where, in this order of what is known of both,

- exact counts are within 3 %: counting the output matrix or not, or another tokenizer, makes that much;
- names give the same number: 65B is not 70B, and 7B is 7B whether it rounds 6.7e9 or 7.6e9;
- a name may round an exact count: it gives 0.96 to 1.1 times less, and no size that models are sold as is nearer.

Names of experts say no total: "8x7B" has 46.7e9, as what is not an expert is there once, "17B-16E" is 17B at work in
each token, of 109e9 with 16 experts and of 400e9 with 128. They equal only a name with the same figures.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SAME_COUNT_RATIO = 1.03
ROUNDED_DOWN, ROUNDED_UP = 1.1, 0.96
"""An exact count over the named one: 1.09 for Qwen2.5-7B (7.6e9), 0.963 for llama-7b (6.74e9)."""
PARAMETERS_TAG = "parameters:"
"""Tag of a record that states the parameter count its model id does not: "parameters:134515008"."""

_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_FULL_PRECISION_BITS = 16
_MAX_TAG_DIGITS = 18
# "8B", "0.5b", "135M", "8x7B", "E4B"; not "128k" (a context), "4bit", or "A3B" (what is active).
_SIZE = re.compile(r"e?(?:(\d{1,4})x)?(\d{1,6}(?:\.\d{1,4})?)([mbt])")
_BITS = re.compile(r"(?:(\d{1,2})-?bits?|(?:q|int|w|mxfp|nvfp|fp)(\d{1,2})\w*)")
_PACKED_FORMATS = {"awq": 4, "gptq": 4}
_AFTER_A_CORPUS = ("token", "tokens")
# "16E" after a size: experts, each token at work in some of them.
_EXPERTS = re.compile(r"(\d{1,4})e")
# What models are named whose counts are within the rounding of one another; billions.
_SOLD = (
    0.5,
    0.6,
    1,
    1.1,
    1.5,
    1.7,
    1.8,
    2,
    3,
    4,
    7,
    8,
    9,
    12,
    13,
    14,
    20,
    22,
    27,
    30,
    32,
    34,
    65,
    70,
    72,
    104,
    110,
    120,
)
# A point parts words ("Instruct.Q4") unless it is within a number ("0.5b"); Ollama parts the size by a colon.
_BETWEEN_WORDS = re.compile(r"[-_ :]|(?<!\d)\.|\.(?!\d)")


@lru_cache(maxsize=4096)
def model_key(model_id: str) -> str:
    """Form in which two spellings of one id are equal."""
    return model_id.strip().casefold()


class ModelSize(NamedTuple):
    """What is known of a model's parameter count, None for nothing; what the name says of experts: "8x", "16e"."""

    exact: float | None
    named: float | None
    experts: str = ""


def model_size(model_id: str, exact: float | None) -> ModelSize:
    """The size of a model whose count is known or not."""
    return ModelSize(exact or None, *_named(model_id))


def record_size(model_id: str, tags: Sequence[str]) -> ModelSize:
    """The size of a record's model, by its id and its "parameters:" tag."""
    return ModelSize(tagged_parameters(tags), *_named(model_id))


def same_size(one: ModelSize, other: ModelSize) -> bool:
    """Whether both are known to be of one size."""
    if one.exact and other.exact:
        return max(one.exact, other.exact) <= SAME_COUNT_RATIO * min(one.exact, other.exact)
    if one.named and other.named:
        return (one.named, one.experts) == (other.named, other.experts)
    for size, name in ((one, other), (other, one)):
        if size.exact and name.named:
            return not name.experts and may_be_called(size.exact, name.named)
    return False


def may_be_called(exact: float, named: float) -> bool:
    """Whether a model of this many parameters may have this number in its name."""

    def apart(name: float) -> float:
        return abs(exact / name - 1)

    def is_rounding(name: float) -> bool:
        return ROUNDED_UP <= exact / name <= ROUNDED_DOWN

    return is_rounding(named) and not any(
        is_rounding(sold * 1e9) and apart(sold * 1e9) < apart(named) * (1 - 1e-9) for sold in _SOLD
    )


def named_parameters(model_id: str) -> float | None:
    """Parameter count by the first size in the name ("Llama-3.1-8B" -> 8e9), None where it states none.

    What is said of tokens is the corpus ("3T-tokens"), and trillions count only where no smaller size is named: corpora
    are counted in them and hardly a model is ("TinyLlama-3T-1.1B" is of 1.1B, "Ling-1T" of 1T). What is said to be at
    work beside a number of experts ("17B-16E") is not the count.
    """
    named, experts = _named(model_id)
    return None if experts.endswith("e") else named


@lru_cache(maxsize=4096)
def _named(model_id: str) -> tuple[float | None, str]:
    """The first size in the name, and its experts in words."""
    words = _words(model_id)
    sizes: list[tuple[bool, float, str]] = []
    for word, after in zip(words, [*words[1:], ""], strict=True):
        found = _SIZE.fullmatch(word)
        if found and after not in _AFTER_A_CORPUS and float(found[2]) > 0:
            experts = after if _EXPERTS.fullmatch(after) else f"{found[1]}x" if found[1] else ""
            sizes.append((found[3] == "t", int(found[1] or 1) * float(found[2]) * _UNITS[found[3]], experts))
    first = min(sizes, key=lambda one: one[0], default=(False, None, ""))
    return first[1], first[2]


@lru_cache(maxsize=4096)
def named_weight_bits(model_id: str) -> int:
    """Weight bits by the name ("...-4bit" -> 4); 16 where it states none, as hubs name converted models only."""
    for word in _words(model_id):
        found = _BITS.fullmatch(word)
        if found:
            return int(found[1] or found[2])
        if word in _PACKED_FORMATS:
            return _PACKED_FORMATS[word]
    return _FULL_PRECISION_BITS


def tagged_parameters(tags: Sequence[str]) -> float | None:
    """Parameter count by the first "parameters:" tag that gives one, None where none does."""
    for tag in tags:
        digits = tag.removeprefix(PARAMETERS_TAG)
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TAG_DIGITS
        if digits != tag and is_number and int(digits) > 0:
            return float(int(digits))
    return None


def _words(model_id: str) -> list[str]:
    return _BETWEEN_WORDS.split(model_key(model_id).rstrip("/").rsplit("/", 1)[-1])

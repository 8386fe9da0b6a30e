"""What a model's id says about its size and the bits of its weights.

Used for one purpose: a record of one model may stand in for another of the same architecture only when both are known
to have the same size and the same weight bits. What the name does not say is unknown, and unknown matches nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SAME_SIZE_RATIO = 1.1
"""Qwen2.5-7B has 7.6e9 parameters, a rounding of 9 %; 7B and 8B, 14 % apart, are different models."""
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
# A point parts words ("Instruct.Q4") unless it is within a number ("0.5b"); Ollama parts the size by a colon.
_BETWEEN_WORDS = re.compile(r"[-_ :]|(?<!\d)\.|\.(?!\d)")


@lru_cache(maxsize=4096)
def model_key(model_id: str) -> str:
    """Form in which two spellings of one id are equal."""
    return model_id.strip().casefold()


@lru_cache(maxsize=4096)
def named_parameters(model_id: str) -> float | None:
    """Parameter count by the first size in the name ("Llama-3.1-8B" -> 8e9), None where it states none.

    What is said of tokens is the corpus ("3T-tokens"), and trillions count only where no smaller size is named: corpora
    are counted in them and hardly a model is ("TinyLlama-3T-1.1B" is of 1.1B, "Ling-1T" of 1T).
    """
    words = _words(model_id)
    sizes = [
        (found[3], int(found[1] or 1) * float(found[2]) * _UNITS[found[3]])
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if after not in _AFTER_A_CORPUS and (found := _SIZE.fullmatch(word)) and float(found[2]) > 0
    ]
    sizes.sort(key=lambda one: one[0] == "t")
    return sizes[0][1] if sizes else None


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


def stated_parameters(model_id: str, tags: Sequence[str]) -> float | None:
    """Parameter count of a record's model: by its name, else by its "parameters:" tag, else None."""
    named = named_parameters(model_id)
    if named is not None:
        return named
    for tag in tags:
        digits = tag.removeprefix(PARAMETERS_TAG)
        if (
            digits != tag
            and digits.isascii()
            and digits.isdigit()
            and len(digits) <= _MAX_TAG_DIGITS
            and int(digits) > 0
        ):
            return float(int(digits))
    return None


def _words(model_id: str) -> list[str]:
    return _BETWEEN_WORDS.split(model_key(model_id).rstrip("/").rsplit("/", 1)[-1])

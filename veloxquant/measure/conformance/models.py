"""Tiny models of mlx-lm's real architectures: a few layers of random float32 weights, the same in every process."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import msgspec

from veloxquant.errors import InvalidParams
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.profiles.calibration import Calibration, LayerSensitivity

if TYPE_CHECKING:
    from veloxquant.profiles.model import CachePart, ModelProfile

VOCABULARY = 64
DTYPE = "float32"
"""16-bit products are emulated on the CPU backend, and very slow."""
_SEED = 7
_TOKENS_SEED = 11
MOST_TOKENS = 1024
_BITS = (2, 3, 4, 5, 6, 8)
_CHANNEL_CLASSES = 4


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of architectures.json."""

    name: str
    what: str
    """What it stands for."""
    takes: tuple[int, ...]
    """Entries of the engine's cache list that a packed cache can stand in for."""
    short: bool
    """Whether the short matrix has it."""
    config: Mapping[str, Any]


@functools.cache
def architectures() -> dict[str, Architecture]:
    """All of them by name, in the order of the table."""
    text = resources.files(__package__).joinpath("architectures.json").read_text(encoding="utf-8")
    return {name: msgspec.convert({"name": name, **entry}, Architecture) for name, entry in json.loads(text).items()}


def architecture(name: str) -> Architecture:
    """Raises InvalidParams for a name that is not in the table."""
    found = architectures().get(name)
    if found is None:
        raise InvalidParams(
            f"no tiny model of the architecture {name!r}",
            hint=f"known: {', '.join(architectures())}",
            field="architecture",
        )
    return found


@functools.cache
def model(name: str) -> Any:
    """The model with its weights computed. Kept, since all variants share it."""
    mx.random.seed(_SEED)
    made = engine.build(architecture(name).config, DTYPE)
    mx.eval(made.parameters())
    return made


@functools.cache
def draft() -> Any:
    """A model of one layer for speculative decoding: of other weights, and so mostly wrong."""
    config = {**architecture("llama").config, "num_hidden_layers": 1}
    mx.random.seed(_SEED + 1)
    made = engine.build(config, DTYPE)
    mx.eval(made.parameters())
    return made


@functools.cache
def profile(name: str) -> ModelProfile:
    """The trace of the model: its engine's own caches, part by part."""
    return tracing.trace(architecture(name).config, DTYPE)


@functools.cache
def text() -> tuple[int, ...]:
    """Token ids of which every check takes the first: random, so that attention finds no pattern to lean on."""
    ids: Any = mx.random.randint(0, VOCABULARY, (MOST_TOKENS,), key=mx.random.key(_TOKENS_SEED)).tolist()
    return tuple(ids)


def logits(made: Any, caches: list[Any], tokens: tuple[int, ...], chunk: int | None = None) -> Any:
    """Logits (tokens, vocabulary) of a model called in chunks, computed."""
    given = mx.array(tokens)[None]
    size = len(tokens) if chunk is None else chunk
    parts = [made(given[:, at : at + size], cache=caches)[0] for at in range(0, len(tokens), size)]
    all_logits = mx.concatenate(parts).astype(mx.float32)
    mx.eval(all_logits)
    return all_logits


class Own(NamedTuple):
    """The engine's own caches on an architecture's model, where a subject has the method's."""

    name: str

    @property
    def model(self) -> Any:
        """Shared with the subjects."""
        return model(self.name)

    def caches(self) -> list[Any]:
        """For one request."""
        return engine.fresh_caches(self.model)


@functools.cache
def own_logits(name: str, count: int, chunk: int | None = None) -> Any:
    """The engine's own caches on the first `count` tokens of the text."""
    own = Own(name)
    return logits(own.model, own.caches(), text()[:count], chunk)


@functools.cache
def own_continued(name: str, count: int, more: int, chunk: int | None = None) -> Any:
    """The `more` tokens after the first `count`, which were given in one call, with the engine's own caches."""
    own = Own(name)
    caches = own.caches()
    logits(own.model, caches, text()[:count])
    return logits(own.model, caches, text()[count : count + more], chunk)


def plain_cache(count: int) -> Any:
    """The engine's KVCache with `count` tokens of zeros."""
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    zeros = mx.zeros((1, 1, count, 1))
    cache.update_and_fetch(zeros, zeros)
    return cache


def draft_caches() -> list[Any]:
    """The engine's own, for one request of the draft."""
    return engine.fresh_caches(draft())


@functools.cache
def calibration(name: str) -> Calibration:
    """Made-up sensitivities of this architecture's layers."""
    growing = {layer.index: part for layer in profile(name).layers if (part := layer.packable) is not None}
    return made_up(name, str(architecture(name).config["model_type"]), profile(name).config_hash, growing)


def made_up(model_id: str, architecture: str, config_hash: str, parts: Mapping[int, CachePart]) -> Calibration:
    """A calibration that nobody measured, for methods that choose bits by one: later layers and heads mind less.

    `parts`: the packed part of each layer, by its place in the engine's cache list.
    """
    return Calibration(
        model_id=model_id,
        architecture=architecture,
        config_hash=config_hash,
        tokens=0,
        text="none: the figures are made up",
        bits=_BITS,
        layers=tuple(_sensitivity(index, part) for index, part in parts.items()),
    )


def _sensitivity(index: int, part: CachePart) -> LayerSensitivity:
    def rows(count: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(4.0**-bits / (1 + at + index) for bits in _BITS) for at in range(count))

    width = part.key_width
    turned = [tuple((head + channel) % width for channel in range(width)) for head in range(part.heads)]
    heads = rows(part.heads)
    return LayerSensitivity(
        index=index, key=heads, value=heads, key_order=tuple(turned), key_classes=rows(_CHANNEL_CLASSES)
    )

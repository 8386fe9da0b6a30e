"""How much a model minds quantized K and V, head by head and bit by bit, from one text and a few backward passes.

To second order an error e in stored K or V moves the model's distribution by KL = 1/2 e' F e, where F is the Fisher
information, the mean of g g' over gradients g of log p(y) with y drawn from the model's own distribution (Martens,
arXiv 1412.1193, section 9). g comes out of a backward pass for all layers at once, and e is what the codec really does
to this K and V. Errors of different tokens are taken as independent, so that the mean KL a token of one head is

    1/2 x sum over tokens (g_token . e_token)^2 / tokens

averaged over draws; for keys that are packed channel by channel, of each channel by itself. One forward and `draws`
backward passes take the place of a run of the model for each head, bits and side. Where recent tokens are kept as they
are, gradients count what queries read of older ones only (`packed_reads`).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from veloxquant.caches import registration
from veloxquant.caches.engine import cache_module
from veloxquant.caches.tiered_layout import Layout
from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.measure import packed_reads
from veloxquant.profiles.calibration import Calibration, LayerSensitivity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from veloxquant.caches.codec import Codec
    from veloxquant.models.resolve import ModelSource

    Codecs = Callable[[int, int], tuple[Codec, Codec]]
    """(width, bits) -> codecs of keys and of values."""
    Stored = dict[int, tuple[Any, Any]]
    """K and V, or their gradients, (1, heads, tokens, width), by place in the engine's cache list."""
    Watch = Callable[[int], None]

BITS = (2, 3, 4, 5, 6, 8)
DRAWS = 4
"""Labels drawn for each token: with 512 tokens 2,048 squares in a mean."""
LEAST_TOKENS = 256
"""Of which some must be packed by then."""
SINKS, RECENT, GROUP = 4, 64, 64
"""Tiers of the caches that are calibrated for (plugins/adaptive.py)."""
CLASSES = 4
"""Of channels. KL of SmolLM2-135M at 3.0, 3.5, 4.0 resident bits, simulated: two classes 0.024, 0.0042, 0.0017; four
0.0115, 0.0032, 0.0016; eight 0.0113, 0.0032, 0.0015; each channel by itself 0.0078 at 3.0."""
_ORDERED_AT = 3


@dataclass(frozen=True)
class Seen:
    """One layer's K and V of the text and what the model's answer draws from them, float32 (heads, tokens, width)."""

    index: int
    keys: Any
    values: Any
    key_gradients: tuple[Any, ...]
    value_gradients: tuple[Any, ...]


def sensitivities(
    model: Any,
    tokens: Sequence[int],
    bits: Sequence[int],
    codecs: Codecs,
    *,
    sinks: int = SINKS,
    recent: int | None = RECENT,
    draws: int = DRAWS,
    watch: Watch | None = None,
) -> tuple[LayerSensitivity, ...]:
    """Mean KL in nats a token for each packable layer, KV head and width of `bits`, of a loaded mlx-lm model.

    `codecs` gives what keys and values of a width are packed with in so many bits (see `codecs`).

    The first `sinks` tokens are left out, and at each token what it reads of the last `recent` ones: they are kept as
    they come. `recent` None: every read counts, and so it does for a model whose own code looks at K and V.

    Raises InvalidParams for a text that is too short, MethodRefused for a model without a plain growing cache, or one
    that cannot be differentiated.
    """
    if len(tokens) < LEAST_TOKENS:
        raise InvalidParams(
            f"{len(tokens)} tokens are too few to calibrate with: at least {LEAST_TOKENS} are needed",
            hint="give a longer text",
            field="text",
        )
    if draws < 1:
        raise InvalidParams(f"{draws} draws give no gradient", hint="give 1 or more", field="draws")
    layout = None if recent is None else Layout.checked(sinks, recent, GROUP, None)
    return tuple(_sensitivity(layer, bits, codecs, sinks) for layer in look(model, tokens, draws, watch, layout))


def calibrate(
    source: ModelSource, model: Any, tokens: Sequence[int], text: str, *, draws: int = DRAWS, watch: Watch | None = None
) -> Calibration:
    """What is kept of a loaded model: sensitivities at every width that can be packed. Raises as `sensitivities`."""
    from veloxquant.models.profile import engine_version

    architecture = source.config.get("model_type")
    return Calibration(
        model_id=source.model_id,
        architecture=architecture if isinstance(architecture, str) else "unknown",
        config_hash=source.config_hash,
        tokens=len(tokens),
        text=text,
        created_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        engine_version=engine_version(),
        mlx_version=metadata.version("mlx"),
        bits=BITS,
        layers=sensitivities(model, tokens, BITS, codecs, draws=draws, watch=watch),
    )


def codecs(width: int, bits: int) -> tuple[Codec, Codec]:
    """What `adaptive` packs with: keys channel by channel, values rotated, with zeros behind to fill groups of 32."""
    from veloxquant.caches.refit import RefitPerChannelCodec
    from veloxquant.caches.rotated import RotatedCodec
    from veloxquant.caches.symmetric import SymmetricCodec

    filled = -(-width // 32) * 32
    group = 32 if filled % 64 else 64
    return RefitPerChannelCodec(width, bits, 64), RotatedCodec(width, SymmetricCodec(filled, bits, group))


def look(
    model: Any,
    tokens: Sequence[int],
    draws: int = DRAWS,
    watch: Watch | None = None,
    layout: Layout | None = None,
) -> list[Seen]:
    """K, V and gradients of every layer whose own cache is a plain KVCache that is written to.

    `layout`: gradients count reads of packed tokens only. `watch` is told after the forward and after each backward
    pass how many are done. Raises MethodRefused.
    """
    import mlx.core as mx

    registration.register()
    ids = mx.array(list(tokens), dtype=mx.int32)[None]
    stored: Stored = {}
    logits = model(ids, cache=_noting_all(model, stored)).astype(mx.float32)
    stored = {at: pair for at, pair in stored.items() if all(x.shape[-1] for x in pair)}
    if not stored:
        raise MethodRefused("no layer of this model keeps a plain growing cache", hint="there is nothing to calibrate")
    mx.eval(logits, list(stored.values()))
    if not mx.isfinite(logits).all().item():
        raise MethodRefused("the model gives no finite numbers on this text", hint="try another text, or float32")
    _tell(watch, 1)
    found: dict[int, list[tuple[Any, Any]]] = {at: [] for at in stored}
    layout = layout if layout is not None and _takes_reads(model, ids, stored, layout) else None
    for draw in range(draws):
        labels = mx.random.categorical(logits, key=mx.random.key(draw))
        for at, pair in _gradients(model, ids, labels, stored, layout).items():
            found[at].append(pair)
        _tell(watch, draw + 2)
    return [
        Seen(
            index=at,
            keys=keys[0].astype(mx.float32),
            values=values[0].astype(mx.float32),
            key_gradients=tuple(key[0] for key, _ in found[at]),
            value_gradients=tuple(value[0] for _, value in found[at]),
        )
        for at, (keys, values) in stored.items()
    ]


def _takes_reads(model: Any, ids: Any, stored: Stored, layout: Layout) -> bool:
    """Whether the model's code passes K and V on to attention as they are; nothing is computed."""
    try:
        model(ids, cache=_adding(model, stored, {}, layout))
    except Exception:  # noqa: BLE001 -- a model's own code, with handles in the place of arrays
        return False
    return True


def _gradients(model: Any, ids: Any, labels: Any, stored: Stored, layout: Layout | None) -> Stored:
    """Of the sum of the labels' log probabilities, by the K and V of each layer."""
    import mlx.core as mx

    def told(added: dict[str, tuple[Any, Any]]) -> Any:
        caches = _adding(model, stored, {int(at): pair for at, pair in added.items()}, layout)
        logits = model(ids, cache=caches).astype(mx.float32)
        picked = mx.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return (picked - mx.logsumexp(logits, axis=-1)).sum()

    nothing = {str(at): (_zeros(keys), _zeros(values)) for at, (keys, values) in stored.items()}
    try:
        gradients = mx.grad(told)(nothing)
        mx.eval(gradients)
    except (ValueError, RuntimeError) as error:
        raise MethodRefused(
            f"this model cannot be differentiated: {error}", hint="give the bits of its layers yourself"
        ) from error
    return {int(at): pair for at, pair in gradients.items()}


def _plain(model: Any) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Fresh caches of the engine's, and which of them are plain ones."""
    caches = list(cache_module().make_prompt_cache(model))
    plain = cache_module().KVCache
    return caches, [(at, cache) for at, cache in enumerate(caches) if type(cache) is plain]


def _noting_all(model: Any, stored: Stored) -> list[Any]:
    """Plain caches note in `stored` what they are given."""
    caches, plain = _plain(model)
    for at, cache in plain:
        cache.update_and_fetch = _noting(cache.update_and_fetch, at, stored)
    return caches


def _adding(model: Any, stored: Stored, added: Stored, layout: Layout | None) -> list[Any]:
    """Plain caches add what is in `added` to K and V: to packed tokens where there is a layout, else to all."""
    caches, plain = _plain(model)
    for at, cache in plain:
        if layout is not None and at in stored:
            packed_reads.watch(cache, added.get(at), layout)
        elif at in added:
            cache.update_and_fetch = _bending(cache.update_and_fetch, added[at])
    return caches


def _noting(update: Callable[[Any, Any], Any], at: int, stored: Stored) -> Any:
    def update_and_fetch(keys: Any, values: Any) -> Any:
        stored[at] = (keys, values)
        return update(keys, values)

    return update_and_fetch


def _bending(update: Callable[[Any, Any], Any], more: tuple[Any, Any]) -> Any:
    def update_and_fetch(keys: Any, values: Any) -> Any:
        pair = zip((keys, values), more, strict=True)
        return update(*((x.astype(add.dtype) + add).astype(x.dtype) for x, add in pair))

    return update_and_fetch


def _sensitivity(layer: Seen, bits: Sequence[int], codecs: Codecs, sinks: int) -> LayerSensitivity:
    width = layer.keys.shape[-1]
    pairs = [codecs(width, each)[0] for each in bits], [codecs(layer.values.shape[-1], each)[1] for each in bits]
    channels = np.stack([_costs(layer.keys, layer.key_gradients, codec, sinks) for codec in pairs[0]], axis=-1)
    order = np.argsort(-channels[..., _judged(bits)], axis=-1, kind="stable")
    ordered = np.take_along_axis(channels, order[..., None], axis=1).sum(axis=0)
    classes = ordered.reshape(_classes(width), -1, len(bits)).sum(axis=1)
    values = [_costs(layer.values, layer.value_gradients, codec, sinks, whole=True) for codec in pairs[1]]
    return LayerSensitivity(
        index=layer.index,
        key=_rows(channels.sum(axis=1)),
        value=_rows(np.stack(values, axis=-1)[:, 0]),
        key_order=tuple(tuple(map(int, head)) for head in order),
        key_classes=_rows(classes),
    )


def _costs(x: Any, gradients: Sequence[Any], codec: Codec, sinks: int, *, whole: bool = False) -> Any:
    """KL by channel, (heads, width), when the tokens after the sinks are packed, as many as fill whole groups.

    `whole`: of a head's channels together, (heads, 1), for a codec whose errors are not those of single channels.
    """
    import mlx.core as mx

    tokens = x.shape[1]
    packed = (tokens - sinks) // codec.tokens * codec.tokens
    held = x[None, :, sinks : sinks + packed]
    fixed = codec.start(held[:, :, :1])
    error = codec.decode(codec.encode(held, fixed), fixed, mx.float32)[0] - held[0]
    told = [gradient[:, sinks : sinks + packed] * error for gradient in gradients]
    draws = [((each.sum(axis=-1, keepdims=True) if whole else each) ** 2).sum(axis=1) for each in told]
    # Of the tokens that fill no group nothing is known: they count as the others do.
    return np.array(mx.stack(draws).mean(axis=0)) / 2 / packed


def _judged(bits: Sequence[int]) -> int:
    """The width of codes that channels are ordered by: the one nearest to 3 bits."""
    return min(range(len(bits)), key=lambda at: abs(bits[at] - _ORDERED_AT))


def _classes(width: int) -> int:
    """Classes of channels: as many as divide the width, four at most."""
    return next(count for count in (CLASSES, 2, 1) if width % count == 0)


def _tell(watch: Watch | None, passes: int) -> None:
    if watch is not None:
        watch(passes)


def _rows(table: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in table)


def _zeros(like: Any) -> Any:
    import mlx.core as mx

    return mx.zeros(like.shape, dtype=mx.float32)

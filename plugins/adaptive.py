"""Bits where the model minds: classes of key channels, value heads and layers share one budget by what they cost.

A calibration says what it costs, in KL, to keep a class of a layer's key channels or one head's values in 2, 3, ... 8
bits (`veloxquantctl sensitivity`), and in what order the channels of each head matter. Bits are dealt out one step at a
time, each to whatever lowers the divergence most for its bytes, until the budget is spent (veloxquant.methods.dealing).

Keys are packed channel by channel in groups along tokens (KIVI, arXiv 2402.02750) in their classes, with refitted
levels; values token by token behind a Hadamard rotation (QuaRot, 2404.00456), with one scale a group and unbiased
levels (EDEN, 2108.08842). The first tokens (2309.17453) and the recent ones stay in the model's format; recent ones
of 8 bits (`recent_bits`) save bytes, but float noise, which differs with how a prompt is cut, may flip their levels.
Each cache holds the order of its channels, a byte each.

`bits` is the budget: mean stored bits a packed number over all packed layers, scales and biases included. With S sinks,
R recent tokens and groups of G, of L tokens G x max(0, (L - S - R) // G) are packed, and S + R + G slots held besides.
"""

from __future__ import annotations

import base64
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.methods import LayerSpec, Method, MethodRefused, Parameter, QualityPrior, Variant, hookimpl
from veloxquant.methods.dealing import Unit, deal, unit
from veloxquant.methods.priors import REALLY_PACKED, from_hard_case
from veloxquant.methods.tiers import EIGHT, Kept, parameters
from veloxquant.methods.workspace import in_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from veloxquant.methods import CachePart, Calibration, LayerPlace, LayerSensitivity, Param

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (64, 32)
"""Along the width: values and recent tokens have the widest that fits."""
_BUDGETS = (5.0, 4.0, 3.0)
"""Bits. Those of 64 more recent tokens are better spent on what is packed: at 3 bits they take away 0.0022 nats for
0.21 bits at 4,096 tokens, where as much more for packed tokens takes away 0.004."""
_BITS_DEFAULT = 4.0
_WIDEST, _WIDEST_VALUE = 256, 2**13
"""Numbers of a key: a byte tells a channel. Of a value: what is rotated."""
_MOST_CLASSES = 4
_MOST_LETTERS = 220 * 2**10
"""Of all layers, base64: an answer of the daemon is at most 1 MiB, and three variants are planned with. 80 layers of 64
KV heads of width 128 fit."""

_HARD_KL = (
    (2.375, 0.111),
    (2.75, 0.092984),
    (3.0, 0.009861),
    (3.5, 0.003069),
    (4.0, 0.001297),
    (5.0, 0.0003135),
    (6.0, 0.0000733),
)
"""Mean KL in nats a token in the hard case of veloxquant.methods.priors, by stored bits a packed number, with 4 sinks,
64 recent tokens in the model's format and bits by a calibration of that model; really packed (bench/quality.py), but
for the first, 2 bits for all, which was simulated."""
_RUN = frozenset(bits for bits, _ in _HARD_KL[1:])
_MORE_RECENT = 1.29
"""What 64 more recent tokens divide the KL by, up to 256, by the same bench: at 3, 3.5 and 4 bits 1.29, 1.34, 1.25 from
64 to 128 and 1.25, 1.26, 1.34 from 128 to 192."""
_NOTHING_RECENT = 3.1
"""What keeping none multiplies it by: 0.0303 at 3 bits."""
_RECENT_IN_EIGHT = 0.0004
"""What recent tokens of 8 bits add: 0.0004 at 3 and at 3.5 bits."""
_NO_SINKS = 2.0
"""No sinks double the KL there; one does as well as four."""
_BETWEEN = "SmolLM2-135M at 4,096 tokens, between really packed budgets (bench/quality.py; upper end)"

_STEP_ARRAYS = 8
"""Arrays of the scores of one query, there at once, as counted with MLX's allocator: classes' products are summed."""

_HINT = "calibrate the model: veloxquantctl sensitivity MODEL; a plan uses the result from then on"


class _Set(NamedTuple):
    """A variant's parameters, defaults filled in, and what a layer has of its own."""

    bits: float
    kept: Kept
    keys: tuple[int, ...] | None
    """Bits of each class of channels."""
    values: tuple[int, ...] | None
    """Bits of each head."""
    order: str


class _Side(NamedTuple):
    """Keys or values of one layer: numbers packed for each of its own, and bits that go with each packed number."""

    width: int
    packed_width: int
    overhead: float

    def stored(self, bits: float) -> float:
        """Stored bits a number."""
        return (bits + self.overhead) * self.packed_width / self.width


class Adaptive(Method):
    """Channels, heads and layers that matter get the bits of those that do not."""

    name = "adaptive"
    version = "1"
    summary = "bits by layer, head and key channel from measured sensitivity, under a byte budget"
    idea = (
        "A few channels, heads and layers cause most of the divergence: bits go where a calibration found them worth."
    )
    keeps = "The first tokens and the most recent ones, in the model's format (or the recent ones in 8 bits)."
    batchable = True
    trimmable = False
    fused_attention = True

    def variants(self) -> Sequence[Variant]:
        """One for each budget worth planning with."""
        return [Variant(method=self.name, label=f"{self.name}-{bits:g}", params={"bits": bits}) for bits in _BUDGETS]

    def parameters(self) -> Sequence[Parameter]:
        """The budget, what is kept besides, and what a layer gets of the budget."""
        own = "between commas; a calibration sets them layer by layer"
        return [
            Parameter(
                name="bits", kind="float", default=_BITS_DEFAULT, low=2.5, high=9.0, help="stored bits a packed number"
            ),
            Parameter(name="group", kind="int", default=64, choices=(32, 64, 128), help="tokens of a group of keys"),
            *parameters(multiple="the group"),
            Parameter(name="keys", kind="str", help=f"bits of each class of key channels {own}"),
            Parameter(name="values", kind="str", help=f"bits of each KV head's values {own}"),
            Parameter(name="order", kind="str", help="the class of each head's channels, base64"),
        ]

    def layer_params(
        self, variant: Variant, places: Sequence[LayerPlace], calibration: Calibration | None
    ) -> Sequence[Mapping[str, Param]] | None:
        """Each packed layer's own parameters. Raises MethodRefused without a calibration of these layers."""
        chosen = _chosen(variant)
        if chosen.keys is not None and chosen.values is not None and chosen.order:
            return None
        if calibration is None:
            raise _not_calibrated(f"{variant.label} deals out bits by a calibration, and this model has none")
        layers = [_measured(place, calibration) for place in places]
        units = [
            list(_units(place.part, chosen, layer, calibration.bits))
            for place, layer in zip(places, layers, strict=True)
        ]
        dealt = iter(deal([one for own in units for one in own], chosen.bits))
        told: list[dict[str, Param]] = []
        for layer, own in zip(layers, units, strict=True):
            bits = [str(next(dealt)) for _ in own]
            classes = len(layer.key_classes)
            keys, values = ",".join(bits[:classes]), ",".join(bits[classes:])
            told.append({"keys": keys, "values": values, "order": _written(layer.key_order, classes)})
        letters = sum(len(str(own["order"])) for own in told)
        if letters > _MOST_LETTERS:
            why = f"the order of all channels takes {letters} letters, and a plan has room for {_MOST_LETTERS}"
            raise MethodRefused(why, hint="choose another method")
        return told

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Keys up to a width of 256, values of any; a budget that buys 2 bits; bits for as many heads as there are."""
        chosen = _chosen(variant)
        for what, width, widest in (("key", part.key_width, _WIDEST), ("value", part.value_width, _WIDEST_VALUE)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            if width > widest:
                return "width_not_divisible", f"the {what} width {width} is above {widest}"
        if chosen.keys is not None and part.key_width % len(chosen.keys):
            return "width_not_divisible", f"{len(chosen.keys)} classes do not divide the key width {part.key_width}"
        why = _unfit(chosen, part)
        return None if why is None else ("not_supported_by_engine", why)

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """The mean over classes, scales and biases included; the budget where nothing is dealt out yet."""
        chosen = _chosen(variant)
        return _mean(chosen.keys, _keys(chosen, part), chosen.bits)

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """The mean over heads, likewise."""
        chosen = _chosen(variant)
        return _mean(chosen.values, _values(part), chosen.bits)

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Sinks and the ring of recent tokens, both whole from the first token on, and a byte for each key channel."""
        kept = _chosen(variant).kept
        return kept.fixed_bytes(part, _eight_bits) + part.heads * part.key_width

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Room for what is packed of so many tokens: whole groups, no slack."""
        return _chosen(variant).kept.slots(tokens)

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound, by veloxquant.methods.workspace."""
        kept, packed = _chosen(variant).kept, _packed_width(part.value_width)
        tiers = kept.tiers(
            part,
            (self.key_bits(variant, part), self.value_bits(variant, part)),
            value_space=packed,
            scale_group=min(kept.group, _fitting(packed)),
            step_arrays=_STEP_ARRAYS,
        )
        return in_tiers(part, tiers, queries, slots)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        chosen = _chosen(variant)
        hard = _hard_kl(chosen.bits) * _of_recent(chosen.kept.recent) * (1 if chosen.kept.sinks else _NO_SINKS)
        run = chosen.bits in _RUN and chosen.kept == Kept()
        return from_hard_case(hard + chosen.kept.in_eight * _RECENT_IN_EIGHT, REALLY_PACKED if run else _BETWEEN)

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh TieredKVCache. Raises MethodRefused where the layer has no bits yet."""
        from veloxquant.caches.channel_classes import ChannelClassesCodec

        chosen, part = _chosen(variant), layer.part
        if chosen.keys is None or chosen.values is None or not chosen.order:
            raise _not_calibrated(f"layer {layer.index} has no bits for its channels and heads")
        classes = ",".join(map(str, chosen.keys))
        keys = ChannelClassesCodec(part.key_width, classes, chosen.order, chosen.kept.group)
        return chosen.kept.cache(keys, _by_head(part.value_width, chosen.values), _in_eight)


def _measured(place: LayerPlace, calibration: Calibration) -> LayerSensitivity:
    """The layer's figures. Raises MethodRefused where they are none of this layer's."""
    layer, part = calibration.layer(place.index), place.part
    if layer is None or {len(layer.key_order), len(layer.value)} != {part.heads} or not layer.key_classes:
        raise _not_calibrated(f"the calibration has no figures for layer {place.index} with {part.heads} KV heads")
    classes = len(layer.key_classes)
    wide = {len(order) for order in layer.key_order} == {part.key_width}
    if not wide or classes > _MOST_CLASSES or part.key_width % classes:
        raise _not_calibrated(f"the calibration of layer {place.index} is not one of key width {part.key_width}")
    return layer


def _units(part: CachePart, chosen: _Set, layer: LayerSensitivity, bits: Sequence[int]) -> Iterator[Unit]:
    """Classes, then value heads. Raises MethodRefused where no width of codes was measured that can be packed."""
    places = [at for at, each in enumerate(bits) if each in _BITS]
    if not places:
        raise _not_calibrated(f"the calibration has none of {_BITS} bits")
    keys, values = _keys(chosen, part), _values(part)
    channels = part.heads * part.key_width / len(layer.key_classes)
    for row in layer.key_classes:
        yield unit(channels, [(bits[at], row[at]) for at in places], keys.stored)
    for row in layer.value:
        yield unit(part.value_width, [(bits[at], row[at]) for at in places], values.stored)


def _unfit(chosen: _Set, part: CachePart) -> str | None:
    if chosen.kept.recent % chosen.kept.group:
        return f"{chosen.kept.recent} recent tokens are no whole groups of {chosen.kept.group}"
    if chosen.keys is None and chosen.bits < (least := _least(chosen, part)):
        return f"a budget of {chosen.bits:g} bits a number, where the least is {least:g}"
    if chosen.keys is not None and len(chosen.keys) > _MOST_CLASSES:
        return f"{len(chosen.keys)} classes of channels, where there may be {_MOST_CLASSES}"
    if not {*(chosen.keys or ()), *(chosen.values or ())} <= set(_BITS):
        return f"bits of {chosen.keys} and {chosen.values} are not all of {_BITS}"
    if chosen.values is not None and len(chosen.values) != part.heads:
        return f"value bits for {len(chosen.values)} heads, and there are {part.heads}"
    return None


def _least(chosen: _Set, part: CachePart) -> float:
    """Stored bits a number with 2 bits for all."""
    keys, values = _keys(chosen, part), _values(part)
    bits = keys.stored(_BITS[0]) * keys.width + values.stored(_BITS[0]) * values.width
    return bits / (keys.width + values.width)


def _chosen(variant: Variant) -> _Set:
    given = variant.params
    return _Set(
        bits=float(given.get("bits") or _BITS_DEFAULT),
        kept=Kept.of(variant),
        keys=_each(given.get("keys")),
        values=_each(given.get("values")),
        order=str(given.get("order") or ""),
    )


def _each(text: Param | None) -> tuple[int, ...] | None:
    """Bits between commas; whatever is not one of them counts as 0, which is refused."""
    known = {str(bits): bits for bits in _BITS}
    return None if text is None else tuple(known.get(one, 0) for one in str(text).split(","))


def _keys(chosen: _Set, part: CachePart) -> _Side:
    return _Side(part.key_width, part.key_width, 2 * 8 * part.key_itemsize / chosen.kept.group)


def _values(part: CachePart) -> _Side:
    packed = _packed_width(part.value_width)
    return _Side(part.value_width, packed, 8 * part.value_itemsize / _fitting(packed))


def _mean(bits: tuple[int, ...] | None, side: _Side, budget: float) -> float:
    return budget if bits is None else side.stored(sum(bits) / len(bits))


def _packed_width(width: int) -> int:
    """Numbers that are packed for a rotated vector: a multiple of the least group, zeros behind the vector."""
    return -(-width // _GROUPS[-1]) * _GROUPS[-1]


def _fitting(width: int) -> int:
    return next((group for group in _GROUPS if width % group == 0), 0)


def _eight_bits(width: int, itemsize: int) -> float:
    """Of one recent vector in 8 bits; in the model's format where no group fits."""
    group = _fitting(width)
    return width * (EIGHT + 2 * 8 * itemsize / group) if group else 8 * itemsize * width


def _in_eight(width: int) -> Any:
    """The codec of `_eight_bits`."""
    from veloxquant.caches.affine_codec import AffineCodec
    from veloxquant.caches.float_codec import FloatCodec

    return AffineCodec(width, EIGHT, group) if (group := _fitting(width)) else FloatCodec(width)


def _by_head(width: int, bits: tuple[int, ...]) -> Any:
    """A rotated codec for each width of codes that some head has."""
    from veloxquant.caches.by_head import ByHeadCodec
    from veloxquant.caches.rotated import RotatedCodec
    from veloxquant.caches.symmetric import SymmetricCodec

    kinds, packed = sorted(set(bits)), _packed_width(width)
    group = _fitting(packed)
    codecs = tuple(RotatedCodec(width, SymmetricCodec(packed, one, group)) for one in kinds)
    return codecs[0] if len(kinds) == 1 else ByHeadCodec(codecs, tuple(kinds.index(one) for one in bits))


def _written(order: Sequence[Sequence[int]], classes: int) -> str:
    """As veloxquant.caches.channel_classes.written, without MLX."""
    each = len(order[0]) // classes
    places = [0] * (len(order) * len(order[0]))
    for head, channels in enumerate(order):
        for place, channel in enumerate(channels):
            places[head * len(channels) + channel] = place // each
    places += [0] * (-len(places) % 4)
    fours = zip(*(places[at::4] for at in range(4)), strict=True)
    return base64.b64encode(bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in fours)).decode()


def _hard_kl(bits: float) -> float:
    """Between the figures of the table on straight lines of log KL; beyond its ends those of the ends."""
    if bits <= _HARD_KL[0][0]:
        return _HARD_KL[0][1]
    for (low, above), (high, below) in itertools.pairwise(_HARD_KL):
        if bits <= high:
            return float(above * (below / above) ** ((bits - low) / (high - low)))
    return _HARD_KL[-1][1]


def _of_recent(tokens: int) -> float:
    """What so many recent tokens multiply the KL by."""
    if not tokens:
        return _NOTHING_RECENT
    return float(_MORE_RECENT ** ((Kept().recent - min(tokens, 256)) / 64))


def _not_calibrated(why: str) -> MethodRefused:
    return MethodRefused(why, hint=_HINT, field="calibration")


@hookimpl
def veloxquant_methods() -> list[Method]:
    """Bits by sensitivity."""
    return [Adaptive()]

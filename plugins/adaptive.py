"""Bits where the model minds: classes of key channels, value heads and layers share one budget by what they cost.

A calibration says what it costs, in KL, to keep a class of a layer's key channels or one head's values in 2, 3, ... 8
bits (`veloxquantctl sensitivity`), and in what order the channels of each head matter. Bits are dealt out one step at a
time, each to whatever lowers the divergence most for its bytes, until the budget is spent: reverse water-filling on
measured curves, made convex so that the order of steps does not matter (Shoham and Gersho, IEEE Trans. ASSP 36, 1988).

Keys are packed channel by channel in groups along tokens (KIVI, arXiv 2402.02750) in their classes, values token by
token behind a Hadamard rotation (QuaRot, 2404.00456), both with refitted codes; the first tokens stay in the model's
format (2309.17453) and the recent ones in 8 bits. Each cache holds the order of its channels, a byte each.

`bits` is the budget: mean stored bits a packed number over all packed layers, scales and biases included.
"""

from __future__ import annotations

import base64
import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from veloxquant.methods import CachePart, Calibration, LayerPlace, LayerSensitivity, Param

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (64, 32)
_BUDGETS = (4.0, 3.5, 3.0, 2.75)
_MOST_TOKENS = 2**16
_WIDEST = 256
"""Key channels of a head, a byte for each."""
_RECENT_BITS = 8
_HINT = "calibrate the model: veloxquantctl sensitivity MODEL; a plan uses the result from then on"


class _Set(NamedTuple):
    """A variant's parameters, defaults filled in, and what a layer has of its own."""

    bits: float
    group: int
    sinks: int
    recent: int
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
    keeps = "The first tokens in the model's format, the most recent ones in 8 bits."
    batchable = True
    trimmable = False
    fused_attention = True

    def variants(self) -> Sequence[Variant]:
        """One for each budget worth planning with."""
        return [Variant(method=self.name, label=f"adaptive-{budget:g}", params={"bits": budget}) for budget in _BUDGETS]

    def parameters(self) -> Sequence[Parameter]:
        """The budget, what is kept besides, and what a layer gets of the budget."""
        own = "between commas; a calibration sets them layer by layer"
        recent = "recent tokens that are kept in 8 bits at least, a multiple of the group"
        return [
            Parameter(name="bits", kind="float", default=3.5, low=2.5, high=9.0, help="stored bits a packed number"),
            Parameter(name="group", kind="int", default=64, choices=(32, 64, 128), help="tokens of a group of keys"),
            Parameter(name="sinks", kind="int", default=4, low=0, high=_MOST_TOKENS, help="first tokens that are kept"),
            Parameter(name="recent", kind="int", default=64, low=0, high=_MOST_TOKENS, help=recent),
            Parameter(name="keys", kind="str", help=f"bits of each class of key channels {own}"),
            Parameter(name="values", kind="str", help=f"bits of each KV head's values {own}"),
            Parameter(name="order", kind="str", help="key channels of each head, those that matter most first, base64"),
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
        dealt = iter(_deal([unit for own in units for unit in own], chosen.bits))
        told: list[dict[str, Param]] = []
        for layer, own in zip(layers, units, strict=True):
            bits = [str(next(dealt)) for _ in own]
            classes = len(layer.key_classes)
            keys, values = ",".join(bits[:classes]), ",".join(bits[classes:])
            told.append({"keys": keys, "values": values, "order": _written(layer.key_order)})
        return told

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Any width of V, and of K up to 256; bits and order for as many heads and channels as there are."""
        chosen = _chosen(variant)
        for what, width in (("key", part.key_width), ("value", part.value_width)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
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
        chosen = _chosen(variant)
        ring = chosen.recent + chosen.group
        bits = 0.0
        for width, itemsize in ((part.key_width, part.key_itemsize), (part.value_width, part.value_itemsize)):
            group = _fitting(width)
            recent = _RECENT_BITS + 2 * 8 * itemsize / group if group else 8 * itemsize
            bits += width * (chosen.sinks * 8 * itemsize + ring * recent)
        return round(part.heads * (bits / 8 + part.key_width))

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Room for what is packed of so many tokens: whole groups, no slack."""
        chosen = _chosen(variant)
        return max(0, (tokens - chosen.sinks - chosen.recent) // chosen.group) * chosen.group

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one."""
        raise NotImplementedError

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh TieredKVCache. Raises MethodRefused where the layer has no bits yet."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.channel_classes import ChannelClassesCodec
        from veloxquant.caches.float_codec import FloatCodec
        from veloxquant.caches.tiered import TieredKVCache

        chosen, part = _chosen(variant), layer.part
        if chosen.keys is None or chosen.values is None or not chosen.order:
            raise _not_calibrated(f"layer {layer.index} has no bits for its channels and heads")
        recent = [
            AffineCodec(width, _RECENT_BITS, _fitting(width)) if _fitting(width) else FloatCodec(width)
            for width in (part.key_width, part.value_width)
        ]
        classes = ",".join(map(str, chosen.keys))
        return TieredKVCache(
            ChannelClassesCodec(part.key_width, classes, chosen.order, chosen.group),
            _by_head(part.value_width, chosen.values),
            sinks=chosen.sinks,
            recent=chosen.recent,
            recent_key_codec=recent[0],
            recent_value_codec=recent[1],
        )


class _Unit(NamedTuple):
    """A class of one layer's key channels, or one head's values: what each step up costs and wins."""

    numbers: float
    """For each token."""
    stored: tuple[float, ...]
    """Bits a number at each step, ascending."""
    bits: tuple[int, ...]
    """Code bits at each step."""
    kl: tuple[float, ...]


def _measured(place: LayerPlace, calibration: Calibration) -> LayerSensitivity:
    """The layer's figures. Raises MethodRefused where they are none of this layer's."""
    layer, part = calibration.layer(place.index), place.part
    if layer is None or {len(layer.key_order), len(layer.value)} != {part.heads} or not layer.key_classes:
        raise _not_calibrated(f"the calibration has no figures for layer {place.index} with {part.heads} KV heads")
    if {len(order) for order in layer.key_order} != {part.key_width} or part.key_width % len(layer.key_classes):
        raise _not_calibrated(f"the calibration of layer {place.index} is not one of key width {part.key_width}")
    return layer


def _units(part: CachePart, chosen: _Set, layer: LayerSensitivity, bits: Sequence[int]) -> Iterator[_Unit]:
    """Classes, then value heads. Raises MethodRefused where no width of codes was measured that can be packed."""
    places = [at for at, each in enumerate(bits) if each in _BITS]
    if not places:
        raise _not_calibrated(f"the calibration has none of {_BITS} bits")
    keys, values = _keys(chosen, part), _values(part)
    channels = part.heads * part.key_width / len(layer.key_classes)
    for row in layer.key_classes:
        yield _convex(keys, channels, [(bits[at], row[at]) for at in places])
    for row in layer.value:
        yield _convex(values, part.value_width, [(bits[at], row[at]) for at in places])


def _convex(side: _Side, numbers: float, curve: Sequence[tuple[int, float]]) -> _Unit:
    """The steps of a curve of (bits, KL) that each win less for their bytes than the one before."""
    hull: list[tuple[int, float]] = []
    for bits, kl in curve:
        if hull and kl >= hull[-1][1]:
            continue  # more bits for nothing: noise
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (bits, kl)):
            hull.pop()
        hull.append((bits, kl))
    steps = tuple(bits for bits, _ in hull)
    return _Unit(numbers, tuple(side.stored(bits) for bits in steps), steps, tuple(kl for _, kl in hull))


def _slope(start: tuple[int, float], end: tuple[int, float]) -> float:
    return (start[1] - end[1]) / (end[0] - start[0])


def _deal(units: Sequence[_Unit], budget: float) -> list[int]:
    """Code bits of every unit, together at most `budget` stored bits a number. Raises MethodRefused for too little."""
    total = budget * sum(unit.numbers for unit in units)
    spent = sum(unit.numbers * unit.stored[0] for unit in units)
    if spent > total:
        least = spent / sum(unit.numbers for unit in units)
        raise MethodRefused(f"a budget of {budget:g} bits a number, and the least is {least:g}", hint="give more bits")
    steps = [0] * len(units)
    waiting = [_step(unit, at, 0) for at, unit in enumerate(units) if len(unit.kl) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, at = heapq.heappop(waiting)
        unit, step = units[at], steps[at]
        more = unit.numbers * (unit.stored[step + 1] - unit.stored[step])
        if spent + more > total:
            continue  # a later step may be smaller
        spent += more
        steps[at] = step + 1
        if step + 2 < len(unit.kl):
            heapq.heappush(waiting, _step(unit, at, step + 1))
    return [unit.bits[step] for unit, step in zip(units, steps, strict=True)]


def _step(unit: _Unit, at: int, step: int) -> tuple[float, int]:
    """Sorts first what wins most for its bytes."""
    more = unit.numbers * (unit.stored[step + 1] - unit.stored[step])
    return (unit.kl[step + 1] - unit.kl[step]) / more, at


def _unfit(chosen: _Set, part: CachePart) -> str | None:
    if chosen.recent % chosen.group:
        return f"{chosen.recent} recent tokens are no whole groups of {chosen.group}"
    if part.key_width > _WIDEST:
        return f"the key width {part.key_width} is above {_WIDEST}"
    if not {*(chosen.keys or ()), *(chosen.values or ())} <= set(_BITS):
        return f"bits of {chosen.keys} and {chosen.values} are not all of {_BITS}"
    if chosen.values is not None and len(chosen.values) != part.heads:
        return f"value bits for {len(chosen.values)} heads, and there are {part.heads}"
    return None


def _chosen(variant: Variant) -> _Set:
    given = variant.params
    return _Set(
        bits=float(given.get("bits") or 3.5),
        group=int(given.get("group") or 64),
        sinks=int(given["sinks"]) if given.get("sinks") is not None else 4,
        recent=int(given["recent"]) if given.get("recent") is not None else 64,
        keys=_each(given.get("keys")),
        values=_each(given.get("values")),
        order=str(given.get("order") or ""),
    )


def _each(text: Param | None) -> tuple[int, ...] | None:
    """Bits between commas; whatever is not one of them counts as 0, which is refused."""
    known = {str(bits): bits for bits in _BITS}
    return None if text is None else tuple(known.get(one, 0) for one in str(text).split(","))


def _keys(chosen: _Set, part: CachePart) -> _Side:
    return _Side(part.key_width, part.key_width, 2 * 8 * part.key_itemsize / chosen.group)


def _values(part: CachePart) -> _Side:
    packed = _packed_width(part.value_width)
    return _Side(part.value_width, packed, 2 * 8 * part.value_itemsize / _fitting(packed))


def _mean(bits: tuple[int, ...] | None, side: _Side, budget: float) -> float:
    return budget if bits is None else side.stored(sum(bits) / len(bits))


def _packed_width(width: int) -> int:
    """Numbers that are packed for a rotated vector: a multiple of the least group, zeros behind the vector."""
    return -(-width // _GROUPS[-1]) * _GROUPS[-1]


def _fitting(width: int) -> int:
    return next((group for group in _GROUPS if width % group == 0), 0)


def _by_head(width: int, bits: tuple[int, ...]) -> Any:
    """A rotated codec for each width of codes that some head has."""
    from veloxquant.caches.by_head import ByHeadCodec
    from veloxquant.caches.refit import RefitAffineCodec
    from veloxquant.caches.rotated import RotatedCodec

    kinds, packed = sorted(set(bits)), _packed_width(width)
    group = _fitting(packed)
    codecs = tuple(RotatedCodec(width, RefitAffineCodec(packed, one, group, unbiased=True)) for one in kinds)
    return codecs[0] if len(kinds) == 1 else ByHeadCodec(codecs, tuple(kinds.index(one) for one in bits))


def _written(order: Sequence[Sequence[int]]) -> str:
    """As veloxquant.caches.channel_classes.written, without MLX."""
    return base64.b64encode(bytes(channel for head in order for channel in head)).decode()


def _not_calibrated(why: str) -> MethodRefused:
    return MethodRefused(why, hint=_HINT, field="calibration")


@hookimpl
def veloxquant_methods() -> list[Method]:
    """Bits by sensitivity."""
    return [Adaptive()]

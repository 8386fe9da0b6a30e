"""TurboQuant: a random rotation makes every coordinate look alike, and one table of levels then fits them all.

`turboquant_mse` stores `bits` a number and one root mean square a vector, for K and V (algorithm 1 of arXiv
2504.19874). `turboquant_prod` stores keys with one bit less and a one-bit sketch of what is left, so that products with
queries are right on average (algorithm 2); values are only averaged and stay with algorithm 1. Nothing is kept in full
precision. Attention unpacks blocks, with MLX's ordinary kernels and no fused one.

In words of 32 bits, rows padded to a multiple of 32, w the width and m = jl_dim (default w):

    mse          bits x ceil(w / 32) words + 1 root mean square in the engine's format
    prod, keys   (bits - 1) x ceil(w / 32) + ceil(m / 32) words + 2 root mean squares (1 at 1 bit: the sketch alone)

With `outlier_channels` the loudest channels of each head's first token form a group of their own, with `outlier_bits`,
and each head keeps their indices: half of them with one bit more makes 2.5 or 3.5 bits (section 4.3 of the paper). Not
planned with: keys with more bits than values are better for the same bytes. SmolLM2-135M, simulated: 0.178 at 3.5 bits
of loud and quiet keys and 3 of values (3.63 bits stored), where 4 and 3 bits have 0.100 (3.75 stored).

`unbiased` stretches the stored root mean square until sum(x y) = sum(x x) for what is read back, y (EDEN, arXiv
2108.08842): the same bytes, and values that attention averages are not short.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl
from veloxquant.methods.priors import from_hard_case, measured_or
from veloxquant.methods.workspace import query_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods import CachePart

_MAX_BITS = 8
_MAX_WIDTH = 2048
"""Of a head; codes of wider rows could depend on how a prompt is cut (veloxquant.caches.ordered)."""
_MAX_SKETCH = 8192
_MAX_SEED = 2**53

_HARD_KL = {1: 6.1, 2: 1.35582, 3: 0.30343, 4: 0.07214, 5: 0.01917, 6: 0.0051, 7: 0.0014, 8: 0.00036}
"""Mean KL in nats a token of SmolLM2-135M-Instruct (head width 64, 4,096 tokens, every token of K and V quantized)
against its float32 cache: measured at 2 to 5 bits with simulated quantizers (the packed cache has 0.0744 at 4 bits and
0.266 at 3 on the first 1,024 tokens). The others were not: a bit is a factor of 3.8 there from 4 to 5, and
of 4.5 from 2 to 3; 1 bit takes the latter, 6 to 8 bits the former."""

_VALUE_KL = {1: 0.67, 2: 0.15035, 3: 0.02661, 4: 0.00635, 5: 0.00165, 6: 0.00043, 7: 0.00011, 8: 0.00003}
"""The values' share of it: values alone, simulated at 2 to 5 bits and extended as above. Shares add up: keys of 4 bits
and values of 2 have 0.208, and 0.07214 - 0.00635 + 0.15035 is 0.216; 5 and 3 have 0.0432 against 0.0441."""
_UNBIASED_VALUE_KL = {1: 0.37, 2: 0.0933, 3: 0.0225, 4: 0.0059, 5: 0.0015, 6: 0.0004, 7: 0.0001, 8: 0.00003}
"""The same unbiased; keys gain next to nothing."""

_PACKED_KL = {(4, 4, False): 0.076184, (5, 3, True): 0.037813, (4, 2, True): 0.170773}
"""By (bits of keys, of values, unbiased) over the same tokens with caches really packed (bench/quality.py)."""

_HARD_SKETCH_KL = {1: 7.0, 2: 3.58022, 3: 1.56823, 4: 0.43049, 5: 0.113, 6: 0.03, 7: 0.0083, 8: 0.0021}
"""The same model with a sketch in its keys, the first 1,024 of those tokens, really packed: measured at 2, 3 and 4
bits. On these tokens levels alone have 0.266 at 3 bits and 0.0744 at 4, a sixth: being right on average is paid for
with noise in every score, which the softmax magnifies. Above 4 bits the table takes that ratio (5.9), below 2 twice."""

_SKETCH_SOURCE = (
    "SmolLM2-135M at 1,024 tokens (the sorted pydoc topics in chunks of 256, float32, really packed; upper end)"
)

_UNPACK_BYTES = 20.0
"""Bytes moved to unpack a number with kernels that are not fused: indices, levels written as float32, read again in a
matrix product, at most 14 by the sizes of these arrays, and what scales, scores and sums of the block add. By bandwidth
that is 290 ps on an M1, 200 on an M2, 37 on an M4 Max. Published for fused kernels, which need less: 124 ps on an M1
Max and 17 on an M5 Max (Qwen3.5-35B-A3B, 10 growing layers, 2 KV heads of width 256, 395 million numbers at 38,596
tokens: 7.7 tokens/s at turbo3 against 12.4 at q8_0; turbo4 was faster than q8_0 there: 16.6;
github.com/TheTom/turboquant_plus, docs/benchmarks.md). Not measured on a Mac."""

_BLOCK_TOKENS, _TILE_ROWS, _BLOCK_NUMBERS, _ENCODE_NUMBERS = 2**8, 2**13, 2**21, 2**19
"""As in veloxquant.caches.attention and packed."""
_SCORE_ARRAYS, _UNPACKED_ARRAYS, _SUM_ARRAYS, _PACKING_ARRAYS = 11, 9, 4, 32
"""Arrays of each kind that are there at once, as counted over head counts, widths and bits: at most, rounded up."""


class _Set(NamedTuple):
    """A variant's parameters, defaults filled in."""

    bits: int
    value_bits: int
    unbiased: bool
    outlier_bits: int | None
    outlier_channels: int
    jl_dim: int | None
    seed: int


class TurboQuantMSE(Method):
    """K and V with the least mean squared error. Needs no calibration, and takes any head width."""

    name = "turboquant_mse"
    version = "1"
    summary = "random rotation and Lloyd-Max levels, packed from the first token"
    paper = "2504.19874"
    idea = "Rotated at random, every number follows one known distribution, whose best levels need no calibration."
    keeps = "Nothing but the size of each K and V, one number."
    batchable = True
    fused_attention = True

    label = "turboquant-mse"
    offered: tuple[int, ...] = (5, 4, 3, 2)
    """Bits that are planned with. With more, the affine format is about as good for its bytes, and faster."""
    unlike: tuple[tuple[int, int], ...] = ((5, 3), (4, 2))
    """Bits of keys and of unbiased values that are planned with: the bytes of 4 and 3 bits, and better."""

    def variants(self) -> Sequence[Variant]:
        """One for each count of bits worth planning with, and for each pair."""
        alike = [Variant(method=self.name, label=f"{self.label}{bits}", params={"bits": bits}) for bits in self.offered]
        pairs = [
            Variant(
                method=self.name,
                label=f"{self.label}-k{keys}v{values}",
                params={"bits": keys, "value_bits": values, "unbiased": True},
            )
            for keys, values in self.unlike
        ]
        return [*alike, *pairs]

    def parameters(self) -> Sequence[Parameter]:
        """Bits, outliers and the seed of the rotation."""
        channels = "channels a head that are kept apart, the loudest of its first token"
        stretched = "whether what is read back is stretched until it is not shrunk"
        return [
            Parameter(name="bits", kind="int", default=4, low=1, high=_MAX_BITS, help="bits a number, scales apart"),
            Parameter(
                name="value_bits", kind="int", low=1, high=_MAX_BITS, help="of values; `bits` where it is not set"
            ),
            Parameter(name="unbiased", kind="bool", default=False, help=stretched),
            Parameter(name="outlier_bits", kind="int", low=1, high=_MAX_BITS, help="bits of the channels kept apart"),
            Parameter(name="outlier_channels", kind="int", default=0, low=0, high=_MAX_WIDTH - 1, help=channels),
            Parameter(name="seed", kind="int", default=0, low=0, high=_MAX_SEED, help="of the random matrices"),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Any width from 1 to 2048, as long as outliers leave a channel and come with their bits."""
        chosen = _chosen(variant)
        if (chosen.outlier_bits is None) != (chosen.outlier_channels == 0):
            return "not_supported_by_engine", "outlier_bits and outlier_channels go together, and only one is set"
        for what, width in (("key", part.key_width), ("value", part.value_width)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            if width > _MAX_WIDTH:
                return "not_supported_by_engine", f"the {what} width {width} is above {_MAX_WIDTH}"
            if chosen.outlier_channels >= width:
                outliers = chosen.outlier_channels
                return "width_not_divisible", f"{outliers} outlier channels leave none of the {what} width {width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Words and root mean squares of a row over its width."""
        return self._key_row(_chosen(variant), part.key_width).bits(part.key_itemsize) / part.key_width

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Algorithm 1's in both methods."""
        return _value_row(_chosen(variant), part.value_width).bits(part.value_itemsize) / part.value_width

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Four bytes for each outlier channel of each head, of K and of V."""
        return 2 * part.heads * _chosen(variant).outlier_channels * 4

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound of the temporary arrays of attention and of packing, which work in blocks and never overlap.

        Counted with MLX's allocator on the CPU backend, whose scheduler has about ten operations in flight.
        """
        chosen = _chosen(variant)
        space = max(self._key_row(chosen, part.key_width).space, _value_row(chosen, part.value_width).space)
        row_bits = self.key_bits(variant, part) * part.key_width + self.value_bits(variant, part) * part.value_width
        packed = math.ceil(part.heads * queries * row_bits / 8)
        return max(_attending(part, queries, slots, space), _packing(part, queries, space) + 2 * packed)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        return _prior(_chosen(variant))

    def unpack_bytes(self, variant: Variant) -> float:
        """What MLX's ordinary kernels move, which are not fused: see `_UNPACK_BYTES`."""
        return _UNPACK_BYTES

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh PackedKVCache. Raises InvalidParams for what is refused."""
        from veloxquant.caches.packed import PackedKVCache

        part = layer.part
        chosen = _chosen(variant)
        return PackedKVCache(self._key_codec(part.key_width, chosen), _values(part.value_width, chosen), part.step)

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """One head, with the same codecs. Raises InvalidParams for what is refused."""
        from veloxquant.caches.standalone import StandaloneCache

        chosen = _chosen(variant)
        return StandaloneCache(self._key_codec(head_dim, chosen), _values(head_dim, chosen))

    def _key_row(self, chosen: _Set, width: int) -> _Row:
        return _mse_row(chosen, width)

    def _key_codec(self, width: int, chosen: _Set) -> Any:
        return _mse(width, chosen)


class TurboQuantProd(TurboQuantMSE):
    """Keys whose products with queries are right on average, values as in `turboquant_mse`."""

    name = "turboquant_prod"
    summary = "random rotation, levels and a one-bit sketch of what they leave: unbiased scores"
    idea = "Signs of random projections of what the levels leave make the scores of keys right on average."
    keeps = "Nothing but the size of each K and V, and of what the levels leave of each K."

    label = "turboquant-prod"
    unlike = ()
    offered = (4,)
    """5 bits would take the bytes of `turboquant_mse` at 5, for less; 3 and 2 lose several times what that loses in
    fewer bytes (at 3 bits 1.57 nats against 0.266 over the same 1,024 tokens)."""

    def parameters(self) -> Sequence[Parameter]:
        """As `turboquant_mse`, and the size of the sketch."""
        text = "signs in the sketch of a key; as many as channels where it is not set"
        sketch = Parameter(name="jl_dim", kind="int", low=1, high=_MAX_SKETCH, help=text)
        return [*super().parameters(), sketch]

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """As `turboquant_mse`, from its own measured figures."""
        chosen = _chosen(variant)
        hard = _HARD_SKETCH_KL[chosen.bits] + _value_change(chosen)
        return from_hard_case(hard, _SKETCH_SOURCE)

    def unpack_bytes(self, variant: Variant) -> float:
        """Keys are unpacked twice, levels and signs; values once."""
        return 1.5 * _UNPACK_BYTES

    def _key_row(self, chosen: _Set, width: int) -> _Row:
        quiet = width - chosen.outlier_channels
        row = _sketched_row(chosen.bits, quiet, chosen.jl_dim or quiet)
        if chosen.outlier_bits is None:
            return row
        return row.beside(_sketched_row(chosen.outlier_bits, chosen.outlier_channels, chosen.outlier_channels))

    def _key_codec(self, width: int, chosen: _Set) -> Any:
        from veloxquant.caches.codecs import make

        sketch = {} if chosen.jl_dim is None else {"jl_dim": chosen.jl_dim}
        return make({"name": "turboquant_prod", **_described(width, chosen), **sketch})


class _Row(NamedTuple):
    """One token of one head."""

    words: int
    scales: int
    space: int
    """Numbers it is unpacked to."""

    def beside(self, other: _Row) -> _Row:
        """Two groups of channels."""
        return _Row(self.words + other.words, self.scales + other.scales, self.space + other.space)

    def bits(self, itemsize: int) -> int:
        """Stored bits, scales in the engine's format."""
        return 32 * self.words + 8 * itemsize * self.scales


def _mse_row(chosen: _Set, width: int) -> _Row:
    quiet = _levels_row(chosen.bits, width - chosen.outlier_channels)
    if chosen.outlier_bits is None:
        return quiet
    return quiet.beside(_levels_row(chosen.outlier_bits, chosen.outlier_channels))


def _value_row(chosen: _Set, width: int) -> _Row:
    return _mse_row(chosen._replace(bits=chosen.value_bits), width)


def _levels_row(bits: int, width: int) -> _Row:
    words = -(-width // 32)
    return _Row(bits * words, 1, 32 * words)


def _sketched_row(bits: int, width: int, signs: int) -> _Row:
    sketch = _levels_row(1, signs)
    return sketch if bits == 1 else _levels_row(bits - 1, width).beside(sketch)


def _chosen(variant: Variant) -> _Set:
    given = variant.params

    def whole(name: str) -> int | None:
        return None if given.get(name) is None else int(given[name])

    bits = whole("bits") or 4
    return _Set(
        bits=bits,
        value_bits=whole("value_bits") or bits,
        unbiased=given.get("unbiased") is True,
        outlier_bits=whole("outlier_bits"),
        outlier_channels=whole("outlier_channels") or 0,
        jl_dim=whole("jl_dim"),
        seed=whole("seed") or 0,
    )


def _described(width: int, chosen: _Set) -> dict[str, int]:
    described = {"width": width, "bits": chosen.bits, "seed": chosen.seed, "outlier_channels": chosen.outlier_channels}
    return described if chosen.outlier_bits is None else {**described, "outlier_bits": chosen.outlier_bits}


def _mse(width: int, chosen: _Set) -> Any:
    from veloxquant.caches.codecs import make

    return make({"name": "turboquant_mse", **_described(width, chosen), "unbiased": chosen.unbiased})


def _values(width: int, chosen: _Set) -> Any:
    return _mse(width, chosen._replace(bits=chosen.value_bits))


def _value_change(chosen: _Set) -> float:
    """What values add to a divergence that was measured with values like the keys."""
    table = _UNBIASED_VALUE_KL if chosen.unbiased else _VALUE_KL
    return table[chosen.value_bits] - _VALUE_KL[chosen.bits]


def _prior(chosen: _Set) -> QualityPrior:
    asked = (chosen.bits, chosen.value_bits, chosen.unbiased)
    measured = None if chosen.outlier_channels else _PACKED_KL.get(asked)
    return measured_or(measured, _HARD_KL[chosen.bits] + _value_change(chosen))


def _attending(part: CachePart, queries: int, slots: int, space: int) -> int:
    """Bytes of float32 arrays: scores, unpacked blocks, sums (veloxquant.caches.attention.Blocks).

    `space` is the numbers that a row of K or V is unpacked to. Where query heads are not known they are at least the KV
    heads.
    """
    heads, most = part.heads, query_heads(part)
    block = max(1, min(_BLOCK_TOKENS, _BLOCK_NUMBERS // (heads * space)))
    tile = min(_TILE_ROWS, _BLOCK_NUMBERS // max(block, space))
    most_rows = min(tile, most * queries)
    least_rows = max(1, min(tile - most, (part.query_heads or heads) * queries))
    least = max(block * max(least_rows, heads * space), least_rows * space)
    tokens = block * min(-(-slots // block), max(1, _BLOCK_NUMBERS // least))
    scores = min(_BLOCK_NUMBERS, most_rows * tokens)
    sums = min(_BLOCK_NUMBERS, most_rows * space * -(-tokens // block))
    return 4 * (_SCORE_ARRAYS * scores + _UNPACKED_ARRAYS * heads * space * tokens + _SUM_ARRAYS * sums)


def _packing(part: CachePart, queries: int, space: int) -> int:
    """Bytes of float32 arrays of a piece of new tokens."""
    numbers = part.heads * max(part.key_width, part.value_width, space)
    return 4 * _PACKING_ARRAYS * min(max(_ENCODE_NUMBERS, numbers), numbers * queries)


@hookimpl
def veloxquant_methods() -> list[Method]:
    """Both algorithms of the paper."""
    return [TurboQuantMSE(), TurboQuantProd()]

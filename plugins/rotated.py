"""Rotated keys and values: a Hadamard rotation spreads what is loud, and few uniform levels then fit every channel.

Turning queries and keys alike leaves every score as it is, and turned values are turned back once a step (QuaRot, arXiv
2404.00456). So two small transforms a step buy numbers without loud channels, which MLX's own quantized kernels read:
nothing is unpacked. Levels are unbiased: stretched until what is read back is not shrunk (EDEN, 2108.08842), since
errors vanish where attention averages and shrinking does not.

`rotated` keeps sinks and recent tokens (2309.17453) and packs rotated keys channel by channel (KIVI, 2402.02750), in
groups of G tokens with a scale and a bias, and values token by token with one scale a group. With S sinks, R recent
tokens, of L tokens G x max(0, (L - S - R) // G) are packed, and S + R + G slots are held besides, whatever L is.

Recent tokens stay in the model's format. With `recent_bits` of 8 they save 0.23 bits a number at 4,096 tokens and cost
next to nothing, but float noise, which differs with how a prompt is cut, may then flip some of their many levels.

MLX's CPU backend takes eight times as long for 3 and 5 bits as for 2, 4 and 8 where it does not transpose (per-channel
keys, values), as it does for the engine's own cache.

`rotated_token` packs each token by itself from the first on, so that its caches can be rewound. Keys and values then
have one scale a group along the width.

A number costs bits + (scales of its group) x 8 x itemsize / group. Widths that groups of 32 do not divide (80, 112) are
filled up with zeros before the rotation where groups run along the width, and cost that much more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl
from veloxquant.methods.priors import REALLY_PACKED, SIMULATED, from_hard_case
from veloxquant.methods.tiers import EIGHT, UNIT, Kept, parameters
from veloxquant.methods.workspace import MANY_ROWS, in_blocks, in_tiers, query_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods import CachePart

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
"""What mx.quantize takes."""
_MOST_SEED = 2**53
_WIDEST = 2**13
_LEAST_BLOCK = 16
"""As in veloxquant.caches.hadamard."""

_HARD_KEY_KL = {2: 0.0525, 3: 0.0085, 4: 0.0016, 5: 0.00037, 6: 0.0001, 8: 0.000006}
_HARD_VALUE_KL = {2: 0.0082, 3: 0.0018, 4: 0.00038, 5: 0.00009, 6: 0.000028, 8: 0.000006}
"""What keys and what values add to the mean KL in nats a token of SmolLM2-135M-Instruct (head width 64, 4,096 tokens)
against its float32 cache, with 4 sinks and 64 recent tokens: simulated at 2 and 3 bits of keys and 2 of values, the
others so that the sums are those of the runs below, within 3 % but for 3 and 2 bits, 7 % above."""
_HARD_KL = {
    (8, 8): 0.0000118,
    (8, 6): 0.0000336,
    (6, 5): 0.0001883,
    (6, 4): 0.0004742,
    (5, 4): 0.0007467,
    (4, 3): 0.0033970,
    (3, 2): 0.0156400,
    (2, 2): 0.0615600,
}
"""The same model and tokens by bits of keys and of values, with caches really packed (bench/quality.py on a CUDA GPU, K
and V in float16)."""
_RECENT_IN_EIGHT = 0.0004
"""What recent tokens of 8 bits add, by the same bench 0.00046 at 5 and 4 bits, 0.00027 at 4 and 3, 0.00057 at 3, 2."""

_HARD_TOKEN_KEY_KL = {2: 1.2, 3: 0.23, 4: 0.057, 5: 0.0155, 6: 0.0048, 8: 0.0004}
_HARD_TOKEN_VALUE_KL = {2: 0.093, 3: 0.0225, 4: 0.0059, 5: 0.0015, 6: 0.0004, 8: 0.0001}
"""The same for every token packed by itself, split to fit what was simulated: 0.371 at 3 and 2 bits, 0.154 at 4 and 2,
0.0835 at 4 and 3, 0.0644 at 4 and 4, 0.0376 at 5 and 3, 0.0193 at 5 and 4, 0.009 at 6 and 4."""
_HARD_TOKEN_KL = {(5, 3): 0.038687}
"""The same really packed."""

_ENCODE_NUMBERS, _SLACK = 2**19, 2**10
"""As in veloxquant.caches.packed and attention."""


class _Set(NamedTuple):
    """A variant's parameters but for what is kept, defaults filled in."""

    key_bits: int = 4
    value_bits: int = 3
    group: int = 64
    seed: int = 0


class Rotated(Method):
    """Rotated keys channel by channel, rotated values token by token, sinks and recent tokens kept."""

    name = "rotated"
    version = "1"
    summary = "Hadamard-rotated per-channel keys and per-token values on MLX's own kernels, recent tokens kept"
    paper = "2404.00456"
    idea = "A rotation spreads loud channels over all, so that a few unbiased levels fit every number."
    keeps = "The first tokens and the most recent ones, in the model's format (or the recent ones in 8 bits)."
    batchable = True
    trimmable = False
    fused_attention = True

    label = "rotated"
    pairs: tuple[tuple[int, int], ...] = ((6, 5), (5, 4), (4, 3), (3, 2), (2, 2))
    """Bits of keys and values that are planned with; keys get more, since the softmax magnifies an error in a score."""

    def variants(self) -> Sequence[Variant]:
        """One for each pair of bits worth planning with."""
        return [
            Variant(
                method=self.name,
                label=f"{self.label}-k{keys}v{values}",
                params={"key_bits": keys, "value_bits": values},
            )
            for keys, values in self.pairs
        ]

    def parameters(self) -> Sequence[Parameter]:
        """Bits of both, the group, what is kept, and the seed of the rotation's signs."""
        return [
            *_shared_parameters("tokens of a group of keys; values have the widest group along the width up to it"),
            *parameters(),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Widths that no rotation serves, and recent tokens that are no multiple of 32."""
        recent = Kept.of(variant).recent
        if recent % UNIT:
            return "not_supported_by_engine", f"{recent} recent tokens are no multiple of {UNIT}"
        return _refused("key", part.key_width, part.key_width) or _refused(
            "value", part.value_width, _filled(part.value_width)
        )

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Codes, and a scale and a bias for each channel of a group of tokens."""
        chosen = _chosen(variant)
        return chosen.key_bits + 2 * 8 * part.key_itemsize / chosen.group

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Codes and a scale for each group along the width, zeros that fill it up included."""
        chosen = _chosen(variant)
        return _row_bits(chosen.value_bits, chosen.group, part.value_width, part.value_itemsize) / part.value_width

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Sinks and the ring of recent tokens, both whole from the first token on."""
        return Kept.of(variant).fixed_bytes(part, _eight_bits)

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Room for what is packed of so many tokens: whole groups, no slack."""
        return Kept.of(variant).slots(tokens)

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound, by veloxquant.methods.workspace."""
        kept, filled = Kept.of(variant), _filled(part.value_width)
        bits = (self.key_bits(variant, part), self.value_bits(variant, part))
        tiers = kept.tiers(part, bits, value_space=filled, scale_group=_fitting(kept.group, filled))
        return in_tiers(part, tiers, queries, slots)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        chosen, kept = _chosen(variant), Kept.of(variant)
        added = _HARD_KEY_KL[chosen.key_bits] + _HARD_VALUE_KL[chosen.value_bits]
        hard = _HARD_KL.get((chosen.key_bits, chosen.value_bits))
        if hard is not None and kept == Kept():
            return from_hard_case(hard, REALLY_PACKED)
        return from_hard_case((added if hard is None else hard) + kept.in_eight * _RECENT_IN_EIGHT, SIMULATED)

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh TieredKVCache. Raises InvalidParams or MethodRefused for what is refused."""
        from veloxquant.caches.refit import RefitPerChannelCodec
        from veloxquant.caches.rotated import RotatedCodec

        chosen, part = _chosen(variant), layer.part
        keys = RefitPerChannelCodec(part.key_width, chosen.key_bits, chosen.group, unbiased=True)
        return Kept.of(variant).cache(
            RotatedCodec(part.key_width, keys, chosen.seed),
            _by_token(part.value_width, chosen.value_bits, chosen),
            lambda width: _in_eight(width, chosen.seed),
        )


class RotatedToken(Rotated):
    """Rotated keys and values, both token by token, nothing kept: what can be rewound."""

    name = "rotated_token"
    summary = "Hadamard-rotated keys and values, each token packed by itself, on MLX's own kernels"
    keeps = "Nothing: every token is packed from the first on."
    trimmable = True

    label = "rotated-token"
    pairs = ((5, 3),)
    """Where keys cost more than anything else, per-channel keys are better; this is for who must rewind."""

    def parameters(self) -> Sequence[Parameter]:
        """Bits of both, the group and the seed."""
        return _shared_parameters("numbers along the width that share a scale, at most")

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Widths that no rotation serves."""
        keys = _refused("key", part.key_width, _filled(part.key_width))
        return keys or _refused("value", part.value_width, _filled(part.value_width))

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """As values."""
        chosen = _chosen(variant)
        return _row_bits(chosen.key_bits, chosen.group, part.key_width, part.key_itemsize) / part.key_width

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """None."""
        return 0

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """By the engine's rule."""
        return None

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound of the temporary arrays of attention and packing, counted with MLX's allocator on the CPU."""
        return _workspace(part, queries, slots)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """As `rotated`, from figures of its own."""
        chosen = _chosen(variant)
        added = _HARD_TOKEN_KEY_KL[chosen.key_bits] + _HARD_TOKEN_VALUE_KL[chosen.value_bits]
        hard = _HARD_TOKEN_KL.get((chosen.key_bits, chosen.value_bits), added)
        run = (chosen.key_bits, chosen.value_bits) in _HARD_TOKEN_KL and chosen.group == _Set().group
        return from_hard_case(hard, REALLY_PACKED if run else SIMULATED)

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh PackedKVCache. Raises InvalidParams or MethodRefused for what is refused."""
        from veloxquant.caches.packed import PackedKVCache

        chosen, part = _chosen(variant), layer.part
        keys = _by_token(part.key_width, chosen.key_bits, chosen)
        return PackedKVCache(keys, _by_token(part.value_width, chosen.value_bits, chosen), part.step)

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """One head, with the same codecs. Raises InvalidParams or MethodRefused for what is refused."""
        from veloxquant.caches.standalone import StandaloneCache

        chosen = _chosen(variant)
        codecs = (_by_token(head_dim, bits, chosen) for bits in (chosen.key_bits, chosen.value_bits))
        return StandaloneCache(*codecs)


def _shared_parameters(group: str) -> list[Parameter]:
    seed = "of the rotation's random signs"
    return [
        Parameter(name="key_bits", kind="int", default=4, choices=_BITS, help="bits a key number, scales apart"),
        Parameter(name="value_bits", kind="int", default=3, choices=_BITS, help="the same of values"),
        Parameter(name="group", kind="int", default=64, choices=_GROUPS, help=group),
        Parameter(name="seed", kind="int", default=0, low=0, high=_MOST_SEED, help=seed),
    ]


def _chosen(variant: Variant) -> _Set:
    return _Set(**{name: int(variant.params[name]) for name in _Set._fields if variant.params.get(name) is not None})


_MOST_GROUP = 64
"""Of recent tokens in 8 bits."""


def _filled(width: int) -> int:
    """The width with zeros up to a multiple of 32."""
    return -(-width // 32) * 32


def _fitting(group: int, width: int) -> int:
    """The widest group, at most `group`, that divides a multiple of 32."""
    return max(one for one in _GROUPS if one <= group and width % one == 0)


def _row_bits(bits: int, group: int, width: int, itemsize: int, scales: int = 1) -> int:
    """Of one vector, zeros included."""
    filled = _filled(width)
    return filled * bits + filled // _fitting(group, filled) * scales * 8 * itemsize


def _refused(what: str, width: int, rotated: int) -> tuple[str, str] | None:
    """Why vectors of a width, rotated with so many numbers, cannot be kept."""
    if width <= 0:
        return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
    if not _rotates(rotated):
        blocks = "blocks of 1, 12, 20 or 28 times a power of two"
        return "width_not_divisible", f"the {what} width {width} is rotated neither at once nor in {blocks}"
    return None


def _rotates(width: int) -> bool:
    """Whether some block serves (veloxquant.caches.hadamard.block)."""
    sizes = {multiple << power for multiple in (1, 12, 20, 28) for power in range(14)}
    return width <= _WIDEST and (width in sizes or any(width % size == 0 for size in sizes if size >= _LEAST_BLOCK))


def _by_token(width: int, bits: int, chosen: _Set) -> Any:
    from veloxquant.caches.rotated import RotatedCodec
    from veloxquant.caches.symmetric import SymmetricCodec

    filled = _filled(width)
    return RotatedCodec(width, SymmetricCodec(filled, bits, _fitting(chosen.group, filled)), chosen.seed)


def _eight_bits(width: int, itemsize: int) -> float:
    """Of one recent vector in 8 bits."""
    return _row_bits(EIGHT, _MOST_GROUP, width, itemsize, scales=2)


def _in_eight(width: int, seed: int) -> Any:
    """8 bits as they come where groups fit, else rotated with zeros behind."""
    from veloxquant.caches.affine_codec import AffineCodec
    from veloxquant.caches.rotated import RotatedCodec

    filled = _filled(width)
    eight = AffineCodec(filled, EIGHT, _fitting(_MOST_GROUP, filled))
    return eight if filled == width else RotatedCodec(width, eight, seed)


_STEP_ARRAYS, _QUERY_ARRAYS, _PACKING_ARRAYS = 5, 4, 24
"""Arrays of each kind that are there at once, as counted over head counts, widths and bits: at most, rounded up."""


def _workspace(part: CachePart, queries: int, slots: int) -> int:
    """Bytes of float32 arrays: a step has the scores of all tokens and their scales; what packing takes comes before.

    More queries, or many of one KV head, work in blocks.
    """
    keys, values = _filled(part.key_width), _filled(part.value_width)
    heads, widths = query_heads(part), keys + values
    step = heads * (_STEP_ARRAYS * (slots + _SLACK) + _QUERY_ARRAYS * widths)
    step += 2 * part.heads * widths * (slots + _SLACK) // min(_GROUPS)
    new = part.heads * widths * (queries + max(_GROUPS))
    packing = 4 * (_PACKING_ARRAYS * min(_ENCODE_NUMBERS, new) + 2 * new)
    unpacks = queries > 1 or heads >= MANY_ROWS * part.heads
    attending = in_blocks(part, max(keys, values), queries, slots) if unpacks else 4 * step
    return max(packing, attending + 4 * heads * queries * part.value_width)


@hookimpl
def veloxquant_methods() -> list[Method]:
    """In tiers, and token by token."""
    return [Rotated(), RotatedToken()]

"""A cache that mlx-lm takes in place of its KVCache and that holds K and V packed from the first token on.

What a number becomes is the codec's matter; here are slots, offsets and what the engine asks of a cache. Each token is
packed by itself, so that how a prompt is cut into calls changes nothing that is stored for the K and V given; those of
the next layer come out of attention, which sees to the same (`attention.Blocks`): to the bit for codecs that unpack,
to rounding for native ones, where a token that comes alone takes a quicker way. Caches of several sequences become one
batch by `merge`, and stay packed in it (`caches.packed_batch`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from veloxquant.caches import incoming, registration
from veloxquant.caches import saved as saved_state
from veloxquant.caches.attention import Packed
from veloxquant.caches.engine import cache_module
from veloxquant.caches.limits import whole
from veloxquant.errors import MethodRefused
from veloxquant.profiles.slots import ENGINE_STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays, Codec
    from veloxquant.caches.packed_batch import BatchPackedKVCache

LAYOUT = 1
"""Of the saved state; raised when what is saved changes, so that an old file is not read for a new one."""
MOST_STEP = 2**20

ENCODE_NUMBERS = 2**19
"""Most numbers of one sequence that are packed at a time, in the space that the codec works in: 2 MiB in float32, and a
codec has some twenty such arrays."""


class PackedKVCache:
    """K and V of one layer, packed by one codec each. Grows by the engine's KVCache rule, in steps of `step` slots.

    Raises EngineUnavailable where mlx-lm cannot serve it, MethodRefused for codecs that only take groups of tokens or
    have heads in arrays apart, InvalidParams for a step that is none.
    """

    bits = group_size = "codec"
    """mlx-lm takes a cache with `bits` for a packed one; no number, so that nothing else can compute with them."""

    def __init__(self, key_codec: Codec, value_codec: Codec, step: int = ENGINE_STEP) -> None:
        registration.register()
        refuse_unfit(key_codec, value_codec)
        check_step(step)
        self.key_codec, self.value_codec, self.step = key_codec, value_codec, step
        self.offset = 0
        """Tokens held."""
        self.keys: list[Any] = []
        self.values: list[Any] = []
        """Arrays of shape (batch, KV heads, slots, ...); empty before the first token."""
        self.key_fixed: Arrays = ()
        self.value_fixed: Arrays = ()

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Packed, Packed]:
        """Pack new tokens, arrays of shape (batch, KV heads, tokens, width), and return what attention takes.

        Raises MethodRefused for arrays of other widths, or of another batch or count of heads than what is held.
        """
        self._check(keys, values)
        tokens = keys.shape[2]
        if self.offset == 0:
            self.key_fixed = self.key_codec.start(keys[:, :, :1])
            self.value_fixed = self.value_codec.start(values[:, :, :1])
        coded_keys = encoded(self.key_codec, keys, self.key_fixed, ())
        coded_values = encoded(self.value_codec, values, self.value_fixed, coded_keys)
        if self.offset + tokens > self._slots():
            self.keys = self._grown(self.keys, coded_keys)
            self.values = self._grown(self.values, coded_values)
        end = self.offset + tokens
        for buffers, coded in ((self.keys, coded_keys), (self.values, coded_values)):
            for buffer, new in zip(buffers, coded, strict=True):
                buffer[..., self.offset : end, :] = new
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """What attention takes, for all tokens held; models whose layers share K and V ask for it."""
        return (
            Packed(self.key_codec, self.keys, self.key_fixed, self.offset),
            Packed(self.value_codec, self.values, self.value_fixed, self.offset),
        )

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the cache, for `mx.eval`, saving and loading: arrays, then whole numbers, then a text."""
        codecs = {"layout": LAYOUT, "keys": self.key_codec.describe(), "values": self.value_codec.describe()}
        text = json.dumps(codecs, sort_keys=True)
        arrays = (tuple(self.keys), tuple(self.values), tuple(self.key_fixed), tuple(self.value_fixed))
        return (*arrays, self.offset, self.step, text)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused for a state that is not one of ours."""
        from veloxquant.caches import codecs

        saved = saved_state.read(state, LAYOUT, groups=4, numbers=2)
        with saved_state.reading():
            made = [codecs.make(saved.text[name]) for name in ("keys", "values")]
        refuse_unfit(*made)
        offset, step = saved.numbers
        check_step(step)
        check_saved(made, saved.groups, offset)
        self.key_codec, self.value_codec = made
        self.keys, self.values = saved.groups[:2]
        self.key_fixed, self.value_fixed = (tuple(fixed) for fixed in saved.groups[2:])
        self.offset, self.step = offset, step

    @classmethod
    def merge(cls, caches: Sequence[PackedKVCache]) -> BatchPackedKVCache:
        """One batch of these sequences' caches, empty ones too; they stay as they are. Raises MethodRefused.

        That is for caches of different codecs or counts of heads, and for one that is itself a batch.
        """
        from veloxquant.caches.packed_batch import BatchPackedKVCache

        return BatchPackedKVCache.merge(caches)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> PackedKVCache:
        """A cache from a saved state (mlx_lm's load_prompt_cache)."""
        registration.register()
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """The engine's own mask for the next tokens: None, "causal" or an array."""
        return cache_module().create_attention_mask(*args, offset=self.offset, **options)

    def is_trimmable(self) -> bool:
        """Always: each token is packed by itself."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last n tokens, or all if there are fewer; how many. Buffers stay, as the engine's do.

        Their slots become zeros: attention multiplies slots behind the last token too, and a weight of 0 leaves a NaN.
        """
        n = max(0, min(self.offset, n))
        self.offset -= n
        for buffer in (*self.keys, *self.values) if n else ():
            buffer[:, :, self.offset : self.offset + n] = 0
        return n

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.keys

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, slack included."""
        held = (*self.keys, *self.values, *self.key_fixed, *self.value_fixed)
        return sum(int(array.nbytes) for array in held)

    def _slots(self) -> int:
        return int(self.keys[0].shape[2]) if self.keys else 0

    def _grown(self, buffers: list[Any], coded: Arrays) -> list[Any]:
        """Room for `coded`: cut to the tokens held if they are no multiple of the step, then whole steps more."""
        import mlx.core as mx

        added = -(-coded[0].shape[2] // self.step) * self.step
        like = buffers or coded  # a number format stays that of the first token
        room = [mx.zeros((*one.shape[:2], added, *one.shape[3:]), dtype=one.dtype) for one in like]
        if not buffers:
            return room
        kept = [buffer[..., : self.offset, :] for buffer in buffers] if self.offset % self.step else buffers
        return [mx.concatenate([old, more], axis=2) for old, more in zip(kept, room, strict=True)]

    def _check(self, keys: Any, values: Any) -> None:
        incoming.check_widths(keys, values, self.key_codec, self.value_codec)
        if self.keys:
            incoming.check_held(keys, self.keys[0])


def refuse_unfit(*codecs: Codec) -> None:
    """Raises MethodRefused for a codec whose slots are groups of tokens, and for one that has heads in arrays apart."""
    for codec in codecs:
        if codec.tokens != 1:
            raise MethodRefused(
                f"the codec packs {codec.tokens} tokens at a time, and this cache takes them one by one",
                hint="use TieredKVCache, which keeps the last tokens apart until they fill a group",
            )
        if hasattr(getattr(codec, "inner", codec), "heads"):
            raise MethodRefused(
                "the codec has heads in arrays apart, and this cache counts its heads by one array",
                hint="use TieredKVCache, which has them together among its recent tokens",
            )


def check_step(step: int) -> None:
    """Raises InvalidParams for slots that no buffer grows by."""
    whole(step, "step", 1, MOST_STEP)


def check_saved(codecs: Sequence[Codec], groups: Sequence[list[Any]], tokens: int, rows: int | None = None) -> None:
    """Raises MethodRefused unless arrays of K, of V and what does not grow of each hold so many tokens of each row."""
    shape = saved_state.rows_and_heads(*groups[:2])
    slots = int(groups[0][0].shape[2]) if groups[0] and groups[0][0].ndim > 2 else 0  # noqa: PLR2004 -- an axis
    if slots < tokens or (slots and rows not in {None, shape[0]}):
        raise saved_state.refusal(f"{shape[0]} rows of {slots} slots for {tokens} tokens")
    for codec, stored, fixed in zip(codecs, groups[:2], groups[2:], strict=True):
        if slots:
            saved_state.check(codec, stored, fixed, shape, slots)
        elif stored or fixed:
            raise saved_state.refusal("arrays without slots")


def encoded(codec: Codec, x: Any, fixed: Arrays, after: Arrays) -> Arrays:
    """What is stored for x, one piece after the other once `after` is there: lazy pieces would be computed together."""
    import mlx.core as mx

    _, heads, tokens, width = x.shape
    size = max(1, ENCODE_NUMBERS // (heads * max(width, codec.space)))
    pieces: list[Arrays] = []
    for start in range(0, tokens, size):
        piece = x[:, :, start : start + size]
        done = pieces[-1] if pieces else after
        pieces.append(codec.encode(mx.depends([piece], list(done))[0] if done else piece, fixed))
    return (
        pieces[0]
        if len(pieces) == 1
        else tuple(mx.concatenate(list(same), axis=2) for same in zip(*pieces, strict=True))
    )

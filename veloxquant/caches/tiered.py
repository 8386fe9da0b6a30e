"""A cache that keeps sinks and recent tokens as they come and packs what lies between, group by group.

Which token is in which tier is a matter of its position and of how many there are (`tiered_layout`), never of how a
prompt was cut: 40 tokens in one call leave the same arrays as 40 calls. Keys may so be packed in groups along tokens
(KIVI, arXiv 2402.02750), which no single token could be; the first tokens draw attention in every head and are kept
(2309.17453).

Arrays have the shape (batch, KV heads, slots, ...). Sinks and ring are allocated whole at the first token; the ring's
slots hold the newest token of their residue, so it always has the last `layout.ring` tokens. Packed buffers grow in
steps of whole groups. In a call of several tokens the earlier of them are gone from the ring by its end, so attention
gets them, and what the ring held before, as a row of columns in order; it lives as long as the call.

A group that was packed cannot become what it was, so there is no going back: `is_trimmable` is False, and mlx-lm
refuses speculative decoding before the first token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from veloxquant.caches import incoming, registration
from veloxquant.caches import saved as saved_state
from veloxquant.caches.engine import cache_module
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.tiered_attention import Tiered
from veloxquant.caches.tiered_layout import Layout
from veloxquant.caches.tiered_part import Part
from veloxquant.caches.tiered_sight import Sight
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Codec
    from veloxquant.caches.saved import Saved
    from veloxquant.caches.tiered_batch import BatchTieredKVCache

_Part = TypeVar("_Part", bound=Part)

LAYOUT = 1
"""Of the saved state; raised when what is saved changes, so that an old file is not read for a new one."""

GROUP = 64
"""Tokens that are packed at a time where neither codec asks for groups."""


class TieredKVCache:
    """K and V of one layer in three tiers. Raises EngineUnavailable where mlx-lm cannot serve it.

    `sinks` and `recent` are tokens, `recent` a multiple of 32; the recent codecs, one slot a token, are floats
    in the model's format where they are not given; `step` is tokens that packed buffers grow by, whole groups.
    """

    bits = group_size = "codec"
    """mlx-lm takes a cache with `bits` for a packed one; no number, so that nothing else can compute with them."""

    def __init__(
        self,
        key_codec: Codec,
        value_codec: Codec,
        *,
        sinks: int = 4,
        recent: int = 64,
        recent_key_codec: Codec | None = None,
        recent_value_codec: Codec | None = None,
        step: int | None = None,
    ) -> None:
        registration.register()
        self.layout = Layout.checked(sinks, recent, _group(key_codec, value_codec), step)
        self.key_part = Part(key_codec, recent_key_codec or FloatCodec(key_codec.width))
        self.value_part = Part(value_codec, recent_value_codec or FloatCodec(value_codec.width))
        self.offset = 0
        """Tokens held."""
        self._last = 0
        """Tokens of the last call."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Tiered, Tiered]:
        """Take new tokens, arrays of shape (batch, KV heads, tokens, width), and return what attention takes.

        Raises MethodRefused for arrays of other widths, or of another batch or count of heads than what is held.
        """
        self._check(keys, values)
        before, self._last = self.offset, keys.shape[2]
        if before == 0:
            self.key_part.allocate(keys, self.layout)
            self.value_part.allocate(values, self.layout)
        columns = self.key_part.write(keys, before, self.layout), self.value_part.write(values, before, self.layout)
        self.offset = before + self._last
        start = None if self._last == 1 else (self.layout.sinks + self.layout.packed(before),)
        return self._handles(columns, start)

    def keys_and_values(self) -> tuple[Tiered, Tiered]:
        """What attention takes after a call of one token; models whose layers share K and V ask for it.

        Raises MethodRefused after a call of more: the earlier of its tokens are gone from the ring by now.
        """
        if self._last > 1:
            raise MethodRefused(
                "a cache in tiers gives what a call of several tokens saw once, and other layers ask for it too",
                hint="keep the engine's cache in layers that share K and V",
            )
        return self._handles((tuple(self.key_part.recent), tuple(self.value_part.recent)), None)

    def _handles(self, columns: Sequence[Any], start: tuple[int] | None) -> tuple[Tiered, Tiered]:
        counted = int(columns[0][0].shape[2]) if columns[0] else 0
        sight = Sight(self.layout, (self.offset - self._last,), (self.offset,), start, counted)
        parts = self.key_part, self.value_part
        keys, values = (Tiered(part.tier(held), sight) for part, held in zip(parts, columns, strict=True))
        return keys, values

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the cache, for `mx.eval`, saving and loading: arrays, then whole numbers, then a text."""
        described = json.dumps({"layout": LAYOUT, **described_tiers(self)}, sort_keys=True)
        return (*self.key_part.arrays, *self.value_part.arrays, self.offset, self._last, described)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused or InvalidParams for a state that is not one of ours."""
        saved = saved_state.read(state, LAYOUT, groups=10, numbers=2)
        layout, parts = restored(saved, Part)
        offset, last = saved.numbers
        shape = saved_state.rows_and_heads(parts[0].recent)
        if last > offset:
            raise saved_state.refusal(f"a call of {last} tokens in a cache of {offset}")
        for part in parts:
            part.check(offset, layout, shape)
        self.layout, (self.key_part, self.value_part) = layout, parts
        self.offset, self._last = offset, last

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> TieredKVCache:
        """A cache from a saved state (mlx_lm's load_prompt_cache)."""
        registration.register()
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[TieredKVCache]) -> BatchTieredKVCache:
        """The batch twin with a row for each cache. Raises MethodRefused for caches unlike each other."""
        from veloxquant.caches.tiered_batch import BatchTieredKVCache

        return BatchTieredKVCache.merge(caches)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """The engine's own mask for the next tokens: None, "causal" or an array."""
        return cache_module().create_attention_mask(*args, offset=self.offset, **options)

    def is_trimmable(self) -> bool:
        """Never: mlx-lm asks once, on an empty cache, and rewinds later, when tokens may have been packed since."""
        return False

    def trim(self, n: int) -> int:
        """Nothing for n < 1. Raises MethodRefused for more: packed tokens cannot become what they were."""
        if n < 1:
            return 0
        raise MethodRefused(
            f"a cache in tiers cannot forget its last {n} tokens: what was packed cannot become what it was",
            hint="keep a copy from before, or choose a method that is trimmable",
        )

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.offset

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, slack included."""
        groups = (*self.key_part.arrays, *self.value_part.arrays)
        return sum(int(array.nbytes) for group in groups for array in group)

    def _check(self, keys: Any, values: Any) -> None:
        incoming.check_widths(keys, values, self.key_part.codec, self.value_part.codec)
        if self.key_part.recent:
            incoming.check_held(keys, self.key_part.recent[0])


def described_tiers(cache: TieredKVCache | BatchTieredKVCache) -> dict[str, Any]:
    """Sizes of the tiers and the codecs of K and of V: what a state tells, and what rows of one batch must share."""
    parts = {"keys": cache.key_part, "values": cache.value_part}
    described = {
        name: {"codec": part.codec.describe(), "recent": part.recent_codec.describe()} for name, part in parts.items()
    }
    return {"tiers": list(cache.layout), **described}


def restored(saved: Saved, kind: type[_Part]) -> tuple[Layout, tuple[_Part, _Part]]:
    """Sizes of the tiers, and the parts of K and of V with their arrays. Raises MethodRefused or InvalidParams."""
    from veloxquant.caches import codecs

    with saved_state.reading():
        sinks, recent, group, step = saved.text["tiers"]
        made = [[codecs.make(saved.text[name][tier]) for tier in ("codec", "recent")] for name in ("keys", "values")]
    keys, values = (kind(*pair) for pair in made)
    layout = Layout.checked(sinks, recent, _group(keys.codec, values.codec), step)
    if layout.group != group:
        raise saved_state.refusal(f"groups of {group} where the codecs pack {layout.group}")
    keys.restore(saved.groups[:5])
    values.restore(saved.groups[5:])
    return layout, (keys, values)


def _group(*codecs: Codec) -> int:
    group = max(codec.tokens for codec in codecs)
    return GROUP if group == 1 else group

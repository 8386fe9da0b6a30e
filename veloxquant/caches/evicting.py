"""A cache that mlx-lm takes in place of its KVCache and that holds a bounded number of tokens, packed if so wished.

Keys stay as the engine rotated them, at their absolute positions: what is kept is seen at its true distance, where
StreamingLLM counts distances within the cache. So a stream may not go beyond the positions a model was trained for.

It is never trimmable: what a rewind would need may be gone, or counted in sums of attention. A cache that said so only
once that is the case would be worse, as mlx-lm's speculative decoding asks at its start and then skips rewinds in
silence; as it is, it refuses before the first token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from veloxquant.caches import eviction, incoming, registration
from veloxquant.caches import saved as saved_state
from veloxquant.caches.engine import cache_module
from veloxquant.caches.evicting_attention import Call, Coming
from veloxquant.caches.evicting_slots import Slots
from veloxquant.caches.eviction import STRIDE, Rule
from veloxquant.caches.rows import Taken, spread
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Codec
    from veloxquant.caches.evicting_batch import BatchEvictingKVCache
    from veloxquant.caches.eviction import Policy

LAYOUT = 1
"""Of the saved state; raised when what is saved changes, so that an old file is not read for a new one."""


class Evicting:
    """What a single cache and its batch twin have in common."""

    bits = group_size = "codec"
    """mlx-lm takes a cache with `bits` for a packed one; no number, so that nothing else can compute with them."""

    def __init__(self, key_codec: Codec, value_codec: Codec, policy: Policy, budget: int, stride: int = STRIDE) -> None:
        registration.register()
        self.policy, self.rule = policy, Rule(budget, stride).check(policy)
        self.slots = Slots(key_codec, value_codec, policy)
        self._call: Call | None = None

    def is_trimmable(self) -> bool:
        """Never: see above."""
        return False

    def trim(self, n: int) -> int:
        """0 of 0. Raises MethodRefused for anything else: fewer than asked would be taken for all."""
        if n > 0:
            raise MethodRefused(
                f"{self.policy.name} drops tokens, and a rewind of {n} may need them",
                hint="decode without a draft model, and start a new prompt with a fresh cache",
            )
        return 0

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.slots.arrays or not self.slots.arrays[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, slack, positions and sums included."""
        return sum(int(array.nbytes) for array in self.slots.arrays)

    def keys_and_values(self) -> Any:
        """Raises MethodRefused: layers that share this one's K and V would ask for what its own queries let go."""
        raise MethodRefused(
            "other layers attend to this layer's K and V, whose own queries decide what is kept",
            hint="keep the engine's cache in this layer",
        )

    def _take(self, keys: Any, values: Any, taken: Taken) -> tuple[Coming, Coming]:
        """Handles of new tokens, (batch, KV heads, tokens, width); room for them is made."""
        self.slots.grow(keys, values, self.rule.slots(spread(taken.ends)[1]))
        self._call = Call(self.slots, self.rule, taken)
        return Coming(keys, self._call), Coming(values, self._call)

    def _check(self, keys: Any, values: Any) -> None:
        if self._call is not None and not self._call.done:
            raise MethodRefused(
                "the tokens before were never attended to, which is when they are stored",
                hint="choose another method for this model",
            )
        incoming.check_widths(keys, values, self.slots.key_codec, self.slots.value_codec)
        if self.slots.arrays:
            incoming.check_held(keys, self.slots.arrays[0])

    def _described(self, **more: Any) -> str:
        """All but the arrays and the lengths, as a text."""
        slots = self.slots
        codecs = {"keys": slots.key_codec.describe(), "values": slots.value_codec.describe()}
        rule = {"policy": eviction.describe(self.policy), **self.rule._asdict()}
        return json.dumps({"layout": LAYOUT, **codecs, **rule, **more}, sort_keys=True)

    def _restore(self, saved: saved_state.Saved, longest: int, rows: int | None = None) -> None:
        """Take over a state, all of it or nothing. Raises MethodRefused for one that does not fit together."""
        from veloxquant.caches import codecs

        text = saved.text
        with saved_state.reading():
            policy = eviction.make(text["policy"])
            rule = Rule(text["budget"], text["stride"]).check(policy)
            slots = Slots(codecs.make(text["keys"]), codecs.make(text["values"]), policy)
        slots.restore(saved.groups[0], rule.slots(longest), rows)
        registration.register()
        self.policy, self.rule, self.slots, self._call = policy, rule, slots, None

    def check_like(self, other: Evicting) -> None:
        """Raises MethodRefused unless the other one keeps tokens as this one does."""
        if self._described() != other._described():
            raise MethodRefused(
                "caches that drop tokens in unlike ways in one batch", hint="use one method for a batch"
            )


class EvictingKVCache(Evicting):
    """K and V of one layer: at most `budget` tokens a head after each eviction, `stride` more before it.

    Raises EngineUnavailable where mlx-lm cannot serve it, MethodRefused for a codec that does not pack tokens one by
    one, InvalidParams for a budget that is smaller than what the policy always keeps.
    """

    offset = 0
    """Tokens seen: the absolute position of the next."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Coming, Coming]:
        """Take new tokens, (batch, KV heads, tokens, width), and return what attention takes, which stores them.

        Raises MethodRefused for arrays of other widths, or of another batch or count of heads than what is held.
        """
        self._check(keys, values)
        batch, _, tokens, _ = keys.shape
        taken = Taken(*(np.full(batch, number, dtype=np.int64) for number in (0, tokens, self.offset)))
        handles = self._take(keys, values, taken)
        self.offset += tokens
        return handles

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the cache, for `mx.eval`, saving and loading: arrays, a whole number, a text."""
        return tuple(self.slots.arrays), self.offset, self._described()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused for a state that is not one of ours."""
        saved = saved_state.read(state, LAYOUT, groups=1, numbers=1)
        (offset,) = saved.numbers
        self._restore(saved, offset)
        self.offset = offset

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> EvictingKVCache:
        """A cache from a saved state (mlx_lm's load_prompt_cache)."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[EvictingKVCache]) -> BatchEvictingKVCache:
        """One batch of these sequences, as packed as they are."""
        from veloxquant.caches.evicting_batch import BatchEvictingKVCache

        return BatchEvictingKVCache.merged(caches)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """The engine's own mask for the next tokens: None, "causal" or an array over absolute positions."""
        return cache_module().create_attention_mask(*args, offset=self.offset, **options)

    def size(self) -> int:
        """Tokens seen, dropped ones too: what mlx-lm counts prompts by."""
        return self.offset

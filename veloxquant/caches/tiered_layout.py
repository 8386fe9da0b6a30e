"""Which token of a sequence is in which tier: sinks, packed groups, a ring of recent tokens. Whole numbers only.

With S sinks, R recent tokens and groups of G, a sequence of L tokens has the first S in the sink tier, then
G x max(0, (L - S - R) // G) packed ones, and the rest in a ring of R + G slots, token p in slot (p - S) mod (R + G).
So the last R tokens at least are never packed, and what is packed is a function of L alone.

A query at position t sees what it would have seen had the prompt ended with it: everything up to S + packed(t + 1)
packed, and the rest as the ring holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from veloxquant.caches.rows import Ints

_MOST = 2**20
UNIT = 32
"""Recent tokens are a multiple of it: the least group."""


class Layout(NamedTuple):
    """Sizes of the tiers, in tokens."""

    sinks: int
    recent: int
    group: int
    step: int
    """Packed buffers grow by it."""

    @classmethod
    def checked(cls, sinks: int, recent: int, group: int, step: int | None) -> Layout:
        """Raises InvalidParams for sizes that are none, or no whole groups."""
        step = group if step is None else step
        for name, value, unit in (("sinks", sinks, 1), ("recent", recent, UNIT), ("step", step, group)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST or value % unit:
                wanted = f"a multiple of {unit}" if unit > 1 else "a whole number"
                message = f"{name} must be {wanted} from 0 to {_MOST}, not {value!r}"
                raise InvalidParams(message, hint=f"give {name} as {wanted}", field=name)
        if not step:
            raise InvalidParams("packed buffers cannot grow by 0", hint=f"give step as {group}", field="step")
        return cls(sinks, recent, group, step)

    @property
    def ring(self) -> int:
        """Slots of the ring."""
        return self.recent + self.group

    def packed(self, tokens: int) -> int:
        """Tokens of a sequence of `tokens` that are packed."""
        return max(0, (tokens - self.sinks - self.recent) // self.group) * self.group

    def groups(self, lengths: Ints) -> Ints:
        """Packed groups of each row: `packed` of every length, in groups."""
        beyond = lengths - (self.sinks + self.recent)
        return (beyond > 0) * beyond // self.group

    def capacity(self, tokens: int) -> int:
        """Tokens that the packed buffers of a sequence of `tokens` have room for."""
        return -(-self.packed(tokens) // self.step) * self.step

    def slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ring's slots of tokens start ... stop - 1, counted from S on, as one or two runs; no more than it has."""
        if start >= stop:
            return []
        low, high = start % self.ring, start % self.ring + stop - start
        return [(low, high)] if high <= self.ring else [(low, self.ring), (0, high - self.ring)]

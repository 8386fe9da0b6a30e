"""Attention sinks and a window: the first tokens and the last ones stay (StreamingLLM, arXiv 2309.17453).

The paper counts positions within the cache, so that a stream may be longer than any text the model was trained on. Here
each key stays at the absolute position where the engine rotated it, as K is handed over rotated: distances are true,
and a stream may not go beyond the model's trained length. Tokens go 64 at a time (`stride`) instead of one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.methods import Method, Parameter, hookimpl
from veloxquant.methods.bounded import BoundedMethod, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import Param


class Streaming(BoundedMethod):
    """Needs no attention weights, and costs least: what stays is known beforehand."""

    name = "streaming"
    summary = "the first tokens and a window of the last ones"
    paper = "2309.17453"
    idea = "Softmax parks the attention it has no use for on the first tokens: with these kept, a window suffices."
    keeps = "At 16 bits all that is held; packed, nothing but positions."
    measured = Measured(half=0.00603, quarter=(0.0428, 0.0431, 0.1707), eighth=(0.08357, 0.08405, 0.20501))

    def parameters(self) -> Sequence[Parameter]:
        """How many first tokens stay."""
        sinks = Parameter(name="sinks", kind="int", default=4, low=0, high=2**20, help="first tokens that stay")
        return [*super().parameters(), sinks]

    def policy(self, params: Mapping[str, Param]) -> dict[str, int | str]:
        """Sinks, and the newest."""
        return {"name": "streaming", "sinks": int(params.get("sinks", 4))}


@hookimpl
def veloxquant_methods() -> list[Method]:
    """StreamingLLM's choice of tokens."""
    return [Streaming()]

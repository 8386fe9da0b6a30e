"""What the last queries look at stays, with its neighbours (SnapKV, arXiv 2404.14469).

The paper decides once, at the end of the prompt, by the attention of its last queries (the observation window), pooled
over neighbouring tokens. A cache cannot know where a prompt ends, and then its memory would peak before. Here the same
is done at every eviction, each 64 tokens (`stride`), with the window just before it: memory is bounded at all times, in
decode too, but what an early window had no eye for is gone when the prompt's end asks for it. Votes of the query heads
of a KV head are added up before they are pooled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.methods import Method, Parameter, hookimpl
from veloxquant.methods.bounded import BoundedMethod, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import Param


class SnapKV(BoundedMethod):
    """Attention of the model's own queries, computed where mlx-lm attends.

    With SmolLM2-135M, 4,096 tokens and a budget of 1,024, windows of 16, 32 and 64 lose 0.040, 0.043 and 0.038 nats;
    kernels of 1, 5 and 7 and both poolings are within 0.0016 of each other.
    """

    name = "snapkv"
    summary = "what the last queries attend to, with its neighbours"
    paper = "2404.14469"
    idea = "Each head looks at the same tokens all through an answer, and the last queries show which these are."
    keeps = "At 16 bits all that is held; packed, nothing but positions and sums of attention (whole numbers)."
    measured = Measured(half=0.00538, quarter=(0.0416, 0.0418, 0.1776), eighth=(0.08339, 0.08251, 0.21383))

    def parameters(self) -> Sequence[Parameter]:
        """The window and the pooling."""
        pooling = 'how a token shares in its neighbours\' votes: "max" or "avg"'
        return [
            *super().parameters(),
            Parameter(name="window", kind="int", default=32, low=1, high=2**16, help="last queries, which stay too"),
            Parameter(name="kernel", kind="int", default=7, low=1, high=63, help="tokens pooled, an odd number"),
            Parameter(name="pooling", kind="str", default="max", choices=("max", "avg"), help=pooling),
        ]

    def policy(self, params: Mapping[str, Param]) -> dict[str, int | str]:
        """Pooled votes of the window."""
        window, kernel = int(params.get("window", 32)), int(params.get("kernel", 7))
        return {"name": "snapkv", "recent": window, "kernel": kernel, "pooling": str(params.get("pooling", "max"))}


@hookimpl
def veloxquant_methods() -> list[Method]:
    """SnapKV's choice of tokens."""
    return [SnapKV()]

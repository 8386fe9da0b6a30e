"""SnapKV with more room in the first layers than in the last (PyramidKV, arXiv 2406.02069).

`budget` is the mean over layers. With w the window, b = budget - w, m layers and beta, layer l holds, in whole tokens,

    w + most - l x (most - least) / (m - 1),   least = b / beta,   most = 2 b - least

which is the paper's arithmetic sequence: the last layer gets b / beta, the first what makes the mean b. Layers are
those that are packed, in order. How tokens are chosen in a layer, and when, is as in `snapkv`.

The paper's tasks ask for few tokens of a long prompt. Where every token's distribution counts, equal budgets are better
(SmolLM2-135M, 4,096 tokens, budget 1,024: KL 0.062 against `snapkv`'s 0.043, and 0.048 with beta 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.methods import Method, Parameter, hookimpl
from veloxquant.methods.bounded import BoundedMethod, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import Calibration, LayerPlace, Param, Variant


class PyramidKV(BoundedMethod):
    """One budget a layer, no calibration."""

    name = "pyramidkv"
    summary = "snapkv with budgets that fall from the first layer to the last"
    paper = "2406.02069"
    idea = "Attention is spread over many tokens in the first layers and gathers on few in the last ones."
    keeps = "At 16 bits all that is held; packed, nothing but positions and sums of attention (whole numbers)."
    measured = Measured(half=0.02366, quarter=(0.0616, 0.0618, 0.189), eighth=(0.11801, 0.11813, 0.24978))

    def parameters(self) -> Sequence[Parameter]:
        """As `snapkv`, and how steep the pyramid is."""
        pooling = 'how a token shares in its neighbours\' votes: "max" or "avg"'
        steep = "the last layer's share of the budget is 1 / beta, the window apart"
        return [
            *super().parameters(),
            Parameter(name="window", kind="int", default=32, low=1, high=2**16, help="last queries, which stay too"),
            Parameter(name="kernel", kind="int", default=7, low=1, high=63, help="tokens pooled, an odd number"),
            Parameter(name="pooling", kind="str", default="max", choices=("max", "avg"), help=pooling),
            Parameter(name="beta", kind="int", default=20, low=1, high=2**16, help=steep),
        ]

    def layer_params(
        self, variant: Variant, places: Sequence[LayerPlace], calibration: Calibration | None
    ) -> Sequence[Mapping[str, Param]] | None:
        """The budget of each layer; the mean is kept to a token."""
        window, budget = int(variant.params.get("window", 32)), int(variant.params.get("budget", 1024))
        return [{"budget": window + room} for room in pyramid(budget - window, len(places), _beta(variant.params))]

    def policy(self, params: Mapping[str, Param]) -> dict[str, int | str]:
        """Pooled votes of the window."""
        window, kernel = int(params.get("window", 32)), int(params.get("kernel", 7))
        return {"name": "snapkv", "recent": window, "kernel": kernel, "pooling": str(params.get("pooling", "max"))}


def pyramid(mean: int, layers: int, beta: int) -> list[int]:
    """Tokens a layer beside the window, falling; their mean is `mean`, rounding apart (section 4 of the paper)."""
    least = mean // beta
    most = 2 * mean - least
    return [most - order * (most - least) // (layers - 1) for order in range(layers)] if layers > 1 else [mean] * layers


def _beta(params: Mapping[str, Param]) -> int:
    return int(params.get("beta", 20))


@hookimpl
def veloxquant_methods() -> list[Method]:
    """PyramidKV's budgets."""
    return [PyramidKV()]

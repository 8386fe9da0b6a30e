"""A third-party method that works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.methods import CachePart, LayerSpec, Method, QualityPrior, Variant, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence


class Halved(Method):
    """Numbers of 8 bits without scales: as simple as a method can be."""

    name = "halved"
    version = "0.3"
    summary = "eight plain bits"

    def variants(self) -> Sequence[Variant]:
        """One."""
        return [Variant(method=self.name, label="halved8", params={"bits": 8})]

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Eight."""
        return 8.0

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Eight."""
        return 8.0

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """An author's own claim."""
        return QualityPrior(kl_mean=0.01, low=0.0, high=0.1, source="a test")

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """The engine's class, imported here and not above."""
        from mlx_lm.models.cache import KVCache

        return KVCache()


@hookimpl
def veloxquant_methods() -> list[Method]:
    """The one method."""
    print("a line that a plugin prints while it loads")  # noqa: T201 -- what a plugin may do, and must not reach standard output
    return [Halved()]

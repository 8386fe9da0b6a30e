"""Takes the name of a built-in method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.methods import CachePart, Method, QualityPrior, Variant, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence


class Usurper(Method):
    """Sound in itself, but its name is taken."""

    name = "affine"

    def variants(self) -> Sequence[Variant]:
        """One, of the built-in method's label."""
        return [Variant(method=self.name, label="affine4-g64", params={"bits": 4, "group": 64})]

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Too good to be true."""
        return 1.0

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Too good to be true."""
        return 1.0

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Too good to be true."""
        return QualityPrior(kl_mean=0.0, low=0.0, high=0.0, source="a test")


@hookimpl
def veloxquant_methods() -> list[Method]:
    """The usurper."""
    return [Usurper()]

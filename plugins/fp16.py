"""The engine's own caches, untouched: what every other method is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.methods import Method, QualityPrior, Variant, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import CachePart, Param


class EngineOwn(Method):
    """Every layer keeps what the engine gives it: 16 bits a number in a 16-bit model, windows and states as they are.

    It packs no layer, so that `build` is never called: a plan that chooses it leaves the model alone.
    """

    name = "fp16"
    version = "1"
    summary = "the engine's own caches, nothing packed"
    idea = (
        "Nothing is lost where nothing is packed: the measure for every other method, and the best one while it fits."
    )
    keeps = "Everything, as the model computes it."
    batchable = True
    fused_attention = True

    def variants(self) -> Sequence[Variant]:
        """One."""
        return [Variant(method=self.name, label="fp16")]

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """The engine's own number."""
        return 8.0 * part.key_itemsize

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """The engine's own number."""
        return 8.0 * part.value_itemsize

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Zero: it is the reference."""
        return QualityPrior(kl_mean=0.0, low=0.0, high=0.0, source="by definition", perplexity_delta=0.0)

    def engine_settings(self, variant: Variant) -> Mapping[str, Param] | None:
        """No flag: the engine's default."""
        return {}

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """One head with K and V as they are given: 16 bits a number of a 16-bit model."""
        from veloxquant.caches.float_codec import FloatCodec
        from veloxquant.caches.standalone import StandaloneCache

        return StandaloneCache(FloatCodec(head_dim), FloatCodec(head_dim))


@hookimpl
def veloxquant_methods() -> list[Method]:
    """The engine's own caches."""
    return [EngineOwn()]

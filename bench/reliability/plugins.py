"""Distributions of one module each, laid out as pip leaves them, for the scripts that load plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
from veloxquant.methods import Method, QualityPrior, Variant, hookimpl
class Mine(Method):
    name = "NAME"
    def variants(self):
        return [Variant(method="NAME", label=f"NAME-{bits}", params={"bits": bits}) for bits in (2, 4, 6, 8)]
    def key_bits(self, variant, part): return float(variant.params["bits"])
    def value_bits(self, variant, part): return float(variant.params["bits"])
    def quality_prior(self, variant): return QualityPrior(kl_mean=0.1, low=0.0, high=0.2, source="a script")
@hookimpl
def veloxquant_methods():
    return [Mine()]
"""
"""A sound plugin of one method with four variants."""


def lay_out(site: Path, name: str, source: str = SOURCE) -> None:
    """One distribution whose entry point, module and method are called after `name`."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[veloxquant.methods]\n{name} = {name}_module\n")
    (site / f"{name}_module.py").write_text(source.replace("NAME", name))

"""Plugins as other people write them, and distributions of one module each as pip leaves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CLASS = """
from veloxquant.methods import Method, QualityPrior, Variant, hookimpl
class Mine(Method):
    name = NAME
    def variants(self):
        return [Variant(method=NAME, label=label, params={"bits": bits}) for label, bits in LABELS.items()]
    def key_bits(self, variant, part): return float(variant.params["bits"])
    def value_bits(self, variant, part): return float(variant.params["bits"])
    def quality_prior(self, variant): return QualityPrior(kl_mean=0.1, low=0.0, high=0.2, source="a test")
"""
HOOK = """
@hookimpl
def veloxquant_methods():
    return [Mine()]
"""


def head(name: str, labels: Mapping[str, int] | None = None) -> str:
    """The class of a sound method, to which more may be added; its labels and their bits, one of 8 bits if not said."""
    shown = {f"{name}8": 8} if labels is None else dict(labels)
    return _CLASS.replace("NAME", repr(name)).replace("LABELS", repr(shown))


def sound(name: str, labels: Mapping[str, int] | None = None) -> str:
    """A plugin of that method with nothing wrong."""
    return head(name, labels) + HOOK


def lay_out(site: Path, dist: str, source: str, version: str = "1.0", *, module: str = "", entry: str = "") -> Path:
    """A distribution of one module, which is given back, in the place of an earlier version.

    Module and entry point are named after it where nothing else is said.
    """
    name = module or f"{dist}_module"
    info = site / f"{dist}-{version}.dist-info"
    for old in site.glob(f"{dist}-*.dist-info"):
        old.rename(info)
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[veloxquant.methods]\n{entry or dist} = {name}\n")
    path = site / f"{name}.py"
    path.write_text(source)
    return path

"""What a plugin author needs: subclass `Method`, return instances from the hook, mark it with `hookimpl`."""

import pluggy

from veloxquant.methods.method import LayerSpec, Method, Param, Parameter, QualityPrior, Variant
from veloxquant.profiles.model import CachePart

hookimpl = pluggy.HookimplMarker("veloxquant")

__all__ = ["CachePart", "LayerSpec", "Method", "Param", "Parameter", "QualityPrior", "Variant", "hookimpl"]

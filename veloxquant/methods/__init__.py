"""What a plugin author needs: subclass `Method`, return instances from the hook, mark it with `hookimpl`."""

import pluggy

from veloxquant.methods.method import LayerSpec, Method, Param, QualityPrior, Variant

hookimpl = pluggy.HookimplMarker("veloxquant")

__all__ = ["LayerSpec", "Method", "Param", "QualityPrior", "Variant", "hookimpl"]

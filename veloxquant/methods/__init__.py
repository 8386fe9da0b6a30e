"""What a plugin author needs: subclass `Method`, return instances from the hook, mark it with `hookimpl`."""

import pluggy

from veloxquant.errors import MethodRefused
from veloxquant.methods.method import LayerPlace, LayerSpec, Method, Param, Parameter, QualityPrior, Variant
from veloxquant.profiles.calibration import Calibration, LayerSensitivity
from veloxquant.profiles.model import CachePart

hookimpl = pluggy.HookimplMarker("veloxquant")

__all__ = [
    "CachePart",
    "Calibration",
    "LayerPlace",
    "LayerSensitivity",
    "LayerSpec",
    "Method",
    "MethodRefused",
    "Param",
    "Parameter",
    "QualityPrior",
    "Variant",
    "hookimpl",
]

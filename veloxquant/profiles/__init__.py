"""The three things a plan is about, as frozen values: machine, model, workload. No I/O, no clock."""

from veloxquant.profiles.calibration import Calibration, LayerSensitivity
from veloxquant.profiles.hardware import HardwareProfile
from veloxquant.profiles.model import CacheLayer, CachePart, KeptLayer, ModelProfile, Probe
from veloxquant.profiles.workload import OBJECTIVES, WorkloadProfile

__all__ = [
    "OBJECTIVES",
    "CacheLayer",
    "CachePart",
    "Calibration",
    "HardwareProfile",
    "KeptLayer",
    "LayerSensitivity",
    "ModelProfile",
    "Probe",
    "WorkloadProfile",
]

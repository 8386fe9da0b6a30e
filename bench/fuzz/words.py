"""Words for the fuzzer to paste into its inputs: names that our readers know, and what JSON is made of."""

from __future__ import annotations

import dataclasses

import msgspec

from veloxquant import config
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.models import fields, static
from veloxquant.profiles import Calibration, HardwareProfile, ModelProfile, WorkloadProfile
from veloxquant.profiles.model import CacheLayer, CachePart
from veloxquant.wire import messages

_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Calibration,
    HardwareProfile,
    ModelProfile,
    WorkloadProfile,
    CacheLayer,
    CachePart,
    messages.Envelope,
)
_INNER = (messages.ModelParams, messages.HardwareOverrides, messages.EngineParams)
_LETTERS = ("{", "}", "[", "]", ":", ",", "null", "true", "false", "NaN", "Infinity", "-1", "0", "1e999", "1e308")
_NUMBERS = ("9007199254740992", "9007199254740993", "18446744073709551616", "134217728", "0.0", "-0.0", "5e-324")
_STRANGE = (r"\\ud800", r"\\u0000", r"\xff", r"\xef\xbb\xbf", r"\x00", r"\x0a", "[[", "]]", "=", "GET / HTTP/1.1")


def known() -> list[str]:
    """As a libFuzzer dictionary has them, without the quotes around each."""
    keys = config.keys()
    names: set[str] = {*keys, *static.families(), *messages.PARAMS}
    names |= {one.name for one in dataclasses.fields(BenchmarkRecord)} | {
        config.variable(key).removeprefix("VELOXQUANT_") for key in keys
    }
    kinds: tuple[type[msgspec.Struct], ...] = (*_STRUCTS, *messages.PARAMS.values(), *_INNER)
    for struct in kinds:
        names |= {field.encode_name for field in msgspec.structs.fields(struct)}
    return sorted({*names, *(rf"\"{name}\"" for name in names), *_LETTERS, *_NUMBERS, *_STRANGE, *_model_fields()})


def _model_fields() -> set[str]:
    """Names of config fields that the readers of models ask for."""
    groups = (value for value in vars(fields).values() if isinstance(value, tuple))
    return {rf"\"{name}\"" for group in groups for name in group if isinstance(name, str) and name.isidentifier()}

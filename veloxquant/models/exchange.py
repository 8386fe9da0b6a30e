"""What the planner's process and the trace worker say to each other: one request, then one JSON answer a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from veloxquant.profiles.calibration import Calibration
from veloxquant.profiles.model import ModelProfile, Probe

PREFILL_TOKENS = 24
DECODE_STEPS = 8
TRACE_RUNS = ((PREFILL_TOKENS, 1), (1, DECODE_STEPS))
"""Calls of a trace, as (tokens, calls). Short, since recurrent layers unroll once for each token on the CPU."""
PROBE_RUNS = ((8, 1), (1, 2))
"""Calls for each variant: fewer, since 8 tokens take the same way through a model as 24 do."""

FailureKind = Literal["not_supported", "config_invalid", "engine_missing"]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One variant to try in place of the engine's own caches."""

    method: str
    label: str
    params: Mapping[str, int | float | str | bool] = {}


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model to trace. `config_json` is JSON as Python writes it: published configs hold Infinity."""

    model_id: str
    config_json: str
    config_hash: str
    dtype: str
    factory: str = ""
    """"module:callable" that makes the object which builds method caches."""
    tried: Mapping[str, str] | None = None
    """What the callable is given, None for nothing: the plugins the asking process loaded, with the stamp of each."""
    probes: tuple[ProbeRequest, ...] = ()
    calibration: Calibration | None = None
    """Of this model, for methods that choose parameters by layer from it."""
    memory_limit_bytes: int = 2 * 2**30
    cpu_limit_s: int = 60


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced"):
    """The engine's own caches; always the first line of an answer that is no failure."""

    profile: ModelProfile
    network: str = ""
    """What kept the worker from the network: see trace_worker.confinement."""


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """What one variant did; in the order of the request."""

    probe: Probe


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine does not take the model, in its own words."""

    kind: FailureKind
    message: str
    hint: str = ""


Answer = Traced | Probed | Failed

_ANSWERS = msgspec.json.Decoder(Answer)


def decode_answers(lines: bytes) -> list[Answer]:
    """The whole lines up to the first that is none of ours: nothing after that one is to be trusted."""
    answers: list[Answer] = []
    for line in lines.split(b"\n")[:-1]:
        try:
            answers.append(_ANSWERS.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
    return answers

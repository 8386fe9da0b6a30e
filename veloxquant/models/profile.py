"""The profile of a model: kept from an earlier trace, traced now, or read statically and said so."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import EngineUnavailable, ModelConfigInvalid, ModelError, ModelNotSupported
from veloxquant.models import fields, own_code, static, store
from veloxquant.models.exchange import ProbeRequest, TraceRequest
from veloxquant.models.resolve import compute_dtype
from veloxquant.models.trace import trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from veloxquant.models.exchange import Failed
    from veloxquant.models.resolve import ModelSource
    from veloxquant.models.weights import WeightFacts
    from veloxquant.profiles import Calibration, ModelProfile

TRACE_SCHEMA = 4
"""Raised when what a trace says, or how it is found, changes; part of the key of kept profiles."""

_MORE_ROOM = "ask again when the machine is less busy, or raise trace.timeout_s or trace.memory_limit_bytes"


def engine_version() -> str | None:
    """Version of the installed mlx-lm, None when it is not installed. Does not import it."""
    return _version("mlx-lm")


def cached(
    source: ModelSource,
    *,
    probes: Sequence[Mapping[str, Any]],
    fingerprint: str,
    cache_dir: Path | None,
    calibration: Calibration | None = None,
) -> ModelProfile | None:
    """The profile of an earlier trace of the same model, engine, methods and calibration, or None. A file read."""
    if cache_dir is None:
        return None
    found = store.read(cache_dir, _key(source, probes, fingerprint, calibration))
    return None if found is None else _weighed(found, source)


def profile(
    source: ModelSource,
    *,
    probes: Sequence[Mapping[str, Any]],
    factory: str,
    fingerprint: str,
    cache_dir: Path | None,
    timeout_s: float = 20.0,
    memory_limit_bytes: int = 2 * 2**30,
    calibration: Calibration | None = None,
    tried: Mapping[str, str] | None = None,
) -> ModelProfile:
    """What an earlier trace said, else a trace now in a worker process: seconds, bounded by time and memory.

    `tried` is handed to the factory: the plugins that may be loaded there, with the stamp of each one's files.
    Where the worker dies or mlx-lm is missing, the static reader answers for the families it knows, and the notes say
    why. Raises ModelConfigInvalid, ModelNotSupported or EngineUnavailable.
    """
    kept = cached(source, probes=probes, fingerprint=fingerprint, cache_dir=cache_dir, calibration=calibration)
    if kept is not None:
        return kept
    if engine_version() is None:
        return _static(source, "mlx-lm is not installed", EngineUnavailable, "pip install mlx-lm")
    dtype, assumed = compute_dtype(source)
    request = TraceRequest(
        model_id=source.model_id,
        config_json=json.dumps(source.config),
        config_hash=source.config_hash,
        dtype=dtype,
        factory=factory,
        tried=tried,
        probes=tuple(msgspec.convert(probe, ProbeRequest) for probe in probes),
        calibration=calibration,
        memory_limit_bytes=memory_limit_bytes,
    )
    found = trace(request, timeout_s=timeout_s)
    if found.profile is None:
        return _without_trace(source, found.failed, found.died)
    traced = msgspec.structs.replace(
        found.profile, engine_version=engine_version(), notes=(*found.profile.notes, *assumed)
    )
    if cache_dir is not None:
        store.write(cache_dir, _key(source, probes, fingerprint, calibration), traced, complete=not found.died)
    return _weighed(traced, source)


def _without_trace(source: ModelSource, failed: Failed | None, died: str) -> ModelProfile:
    """A typed error for what the engine refuses; the static reader for what it could not be asked."""
    if failed is None:
        return _static(source, f"the trace {died or 'gave no answer'}", ModelNotSupported, _MORE_ROOM)
    if failed.kind == "engine_missing":
        return _static(source, failed.message, EngineUnavailable, failed.hint)
    if failed.kind == "config_invalid":
        raise ModelConfigInvalid(failed.message, hint=failed.hint, field="model.config")
    if source.config.get("model_type") in static.families() and "has no model_type" in failed.message:
        # The installed engine is older than the family.
        return _static(source, failed.message, ModelNotSupported, failed.hint)
    hint = "; ".join([*own_code.note(source.config), failed.hint])
    raise ModelNotSupported(failed.message, hint=hint, field="model.config")


def _static(source: ModelSource, why: str, otherwise: type[ModelError], way_out: str) -> ModelProfile:
    """What the static reader says; its first note is why the engine was not asked, and what to do about it."""
    try:
        found = static.read(source)
    except ModelNotSupported as error:
        raise otherwise(f"{why}, and {error.message}", hint=way_out, field="model.config") from error
    note = f"{why}: {way_out}" if way_out else why
    return _weighed(msgspec.structs.replace(found, notes=(note, *found.notes)), source)


def _weighed(found: ModelProfile, source: ModelSource) -> ModelProfile:
    """Let what the weight files or the caller say win over what parameter shapes imply."""
    facts = source.weights
    held, notes = (None, ()) if facts is None else _held(facts, found, source.config)
    weights_bytes, read, origin = found.weights_bytes, found.read_bytes_per_token, found.weights_source
    if facts is not None and held is not None:
        if read is not None and weights_bytes:
            read = round(read * held / weights_bytes)
        weights_bytes, origin = held, facts.source
    bits = weights_bytes * 8 / found.num_parameters if weights_bytes is not None and found.num_parameters else None
    return msgspec.structs.replace(
        found,
        model_id=source.model_id,
        notes=(*found.notes, *own_code.note(source.config), *notes),
        weights_bytes=weights_bytes,
        weights_source=origin or "unknown: no weight files, and none were traced",
        read_bytes_per_token=read,
        weight_bits=bits,
    )


def _held(facts: WeightFacts, found: ModelProfile, config: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Bytes of the weights once loaded, None where parameter shapes know better, and what is to be said of them."""
    if not facts.float8_bytes or facts.source == "given" or facts.weights_bytes is None:
        return facts.weights_bytes, facts.notes
    if not fields.widens_float8(config):
        return facts.weights_bytes, (*facts.notes, "the files hold 8-bit floats; they are counted as they are")
    notes = (*facts.notes, "the files hold 8-bit floats, which the engine widens to 16 bits when it loads them")
    return (None if found.weights_bytes is not None else facts.weights_bytes + facts.float8_bytes), notes


def _key(
    source: ModelSource, probes: Sequence[Mapping[str, Any]], fingerprint: str, calibration: Calibration | None
) -> str:
    """Everything a trace depends on. The weights matter only by the number format they give."""
    parts = {
        "schema": TRACE_SCHEMA,
        "config": source.config_hash,
        "dtype": compute_dtype(source)[0],
        "engine": engine_version(),
        "mlx": _version("mlx"),
        "methods": fingerprint,
        "probes": [dict(probe) for probe in probes],
        "calibration": None if calibration is None else msgspec.to_builtins(calibration),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

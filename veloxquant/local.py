"""The composition root: joins the rooms into one world that can answer, for the daemon and for a client without one.

Reading order of an answer: `open_world`, then `model_source` -> `cached_profile` or `trace_profile` -> `request` ->
`planner.plan.plan`. The daemon calls the steps apart, because a trace must not block it; `plan` and `fit` run them all.
mlx_lm is never imported in this process.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from veloxquant import paths
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, default_benchmark_dir
from veloxquant.benchmarks.calibrations import Calibrations
from veloxquant.errors import EngineUnavailable, StoreError
from veloxquant.hardware.detect import detect
from veloxquant.hardware.overrides import is_elsewhere, with_overrides
from veloxquant.methods import registry
from veloxquant.models import profile as models_profile
from veloxquant.models.resolve import ModelSource, resolve
from veloxquant.planner.fit import fit as fit_purely
from veloxquant.planner.plan import plan as plan_purely
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.snapshot import NoRecords, Offer, QuarantinedMethod, Records, Snapshot
from veloxquant.views import known_names, no_such_method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.config import Config
    from veloxquant.methods import Method
    from veloxquant.methods.registry import Loaded
    from veloxquant.planner.fit import FitTable
    from veloxquant.planner.result import Plan
    from veloxquant.profiles import Calibration, HardwareProfile, ModelProfile
    from veloxquant.wire.messages import EngineParams, FitParams, PlanParams

FACTORY = "veloxquant.methods.worker:load"
"""What the trace worker calls to build method caches; a dotted name, so that models need not import methods."""

DISABLED = "disabled in the configuration"
"""The reason of a method that the user does not want."""

_TRACE_BYTES = 64 * 1024
"""About what one traced model takes on disk."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """Everything an answer depends on besides the request. A change builds a new one."""

    config: Config
    snapshot: Snapshot
    loaded: Loaded

    @property
    def ready(self) -> tuple[Method, ...]:
        """The methods on offer: loaded and not disabled."""
        disabled = self.config.methods.disabled
        return tuple(method for method in self.loaded.methods if method.name not in disabled)


def open_world(
    config: Config,
    *,
    generation: int = 0,
    source: str = "local",
    hardware: HardwareProfile | None = None,
    records: Records | None = None,
    calibrations: Mapping[tuple[str, str], Calibration] | None = None,
    loaded: Loaded | None = None,
) -> World:
    """Load plugins, look at the machine, read the records and the calibrations, except for what is given.

    Never raises for a bad plugin (quarantined), unknown hardware (None fields) or unreadable records (none are used,
    and the log says why): planning goes on with less.
    """
    loaded = registry.load() if loaded is None else loaded
    disabled = frozenset(config.methods.disabled)
    fenced = [QuarantinedMethod(q.name, q.reason, q.distribution) for q in loaded.quarantined]
    off = [QuarantinedMethod(m.name, DISABLED, loaded.origin(m.name)) for m in loaded.methods if m.name in disabled]
    snapshot = Snapshot(
        hardware=detect() if hardware is None else hardware,
        offers=tuple(Offer(method, variant) for method, variant in loaded.variants if method.name not in disabled),
        records=read_records(config) if records is None else records,
        quarantined=tuple(fenced + off),
        reserve_bytes=config.planner.reserve_bytes,
        generation=generation,
        settled_generation=generation,
        source=source,
        calibrations=read_calibrations(config) if calibrations is None else calibrations,
    )
    return World(config=config, snapshot=snapshot, loaded=loaded)


def records_directory(config: Config) -> Path:
    """The benchmark directory the configuration names, else the default one."""
    chosen = config.records.directory
    return Path(chosen).expanduser() if chosen else default_benchmark_dir()


def read_records(config: Config) -> Records:
    """The records of the configured directory, frozen; none when the directory cannot be read."""
    try:
        return BenchmarkDatabase(records_directory(config)).record_set(config.planner.match_threshold)
    except StoreError as error:
        _log.warning("planning without records: %s", error.message)
        return NoRecords()


def read_calibrations(config: Config) -> Mapping[tuple[str, str], Calibration]:
    """Those of the configured directory by (model id, config hash); what cannot be read is left out, and logged."""
    try:
        found = Calibrations(records_directory(config))
    except StoreError as error:
        _log.warning("planning without calibrations: %s", error.message)
        return {}
    found.look()
    if found.trouble is not None:
        _log.warning("planning without calibrations: %s", found.trouble)
    for name, why in found.skipped.items():
        _log.warning("the calibration %s is not used: %s", found.folder / name, why)
    return found.known


def trace_directory(config: Config) -> Path:
    """Where traced model profiles are kept."""
    chosen = config.trace.cache_directory
    return Path(chosen).expanduser() if chosen else paths.cache_dir() / "traces"


def model_source(params: PlanParams | FitParams) -> ModelSource:
    """Find the model a request names: a folder, an id in the local hub cache, or an inline config. Never the network.

    Raises ModelNotFound, ModelConfigInvalid, InvalidParams.
    """
    model = params.model
    return resolve(
        path=model.path,
        model_id=model.id,
        config=model.config,
        config_model_id=model.model_id,
        weights_bytes=model.weights_bytes,
    )


def cached_profile(source: ModelSource, world: World) -> ModelProfile | None:
    """The profile of an earlier trace under this engine and these methods, None when there is none. A file read."""
    return models_profile.cached(
        source,
        probes=world.loaded.probes(),
        fingerprint=world.loaded.fingerprint,
        cache_dir=trace_directory(world.config),
        calibration=world.snapshot.calibration(source.model_id, source.config_hash),
    )


def trace_profile(source: ModelSource, world: World) -> ModelProfile:
    """Trace the model in a worker process: seconds, blocking, bounded by the configured time and memory.

    A disk that cannot keep the trace is told of in the profile, and so in each plan made from it.
    Raises ModelConfigInvalid, ModelNotSupported, EngineUnavailable.
    """
    trace = world.config.trace
    found = models_profile.profile(
        source,
        probes=world.loaded.probes(),
        factory=FACTORY,
        fingerprint=world.loaded.fingerprint,
        cache_dir=trace_directory(world.config),
        timeout_s=trace.timeout_s,
        memory_limit_bytes=trace.memory_limit_bytes,
        calibration=world.snapshot.calibration(source.model_id, source.config_hash),
        tried=world.loaded.stamps or None,
    )
    why = _unkept(world.config) if found.source == "traced" else None
    return found if why is None else msgspec.structs.replace(found, unkept=why)


def _unkept(config: Config) -> str | None:
    """Why a traced model cannot be kept, with the way out; None when it can. Writes a small file and removes it."""
    folder = trace_directory(config)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".room-") as file:
            file.write(bytes(_TRACE_BYTES))
            file.flush()
    except OSError as error:
        why = error.strerror or error
        return (
            f"traced models cannot be kept in {folder} ({why}), each is traced again by the next process: "
            "free some disk space, make the folder writable, or set trace.cache_directory"
        )
    return None


def request(params: PlanParams | FitParams, profile: ModelProfile, world: World) -> PlanRequest:
    """The resolved request: overrides applied to the machine, engine and method names checked.

    Raises EngineUnavailable, MethodNotFound, InvalidParams.
    """
    overrides = params.hardware.given() if params.hardware is not None else {}
    return PlanRequest(
        model=profile,
        workload=params.workload_profile,
        hardware=with_overrides(world.snapshot.hardware, overrides) if overrides else None,
        elsewhere=is_elsewhere(world.snapshot.hardware, overrides),
        engine_version=_engine_version(params.engine, profile),
        memory_budget_bytes=params.memory_budget_bytes,
        methods=_method_names(params.methods, world),
    )


def plan(params: PlanParams, world: World) -> Plan:
    """One answer from start to end in this process. Raises what `model_source`, `trace_profile`, `request` raise."""
    return plan_purely(_resolved(params, world), world.snapshot)


def fit(params: FitParams, world: World) -> FitTable:
    """The largest context per variant at 1, 2, 4 and 8 slots. Raises what `plan` raises."""
    return fit_purely(_resolved(params, world), world.snapshot)


def _resolved(params: PlanParams | FitParams, world: World) -> PlanRequest:
    source = model_source(params)
    profile = cached_profile(source, world)
    return request(params, trace_profile(source, world) if profile is None else profile, world)


def _engine_version(engine: EngineParams | None, profile: ModelProfile) -> str | None:
    """The engine version to plan for: the installed one, which is the only one that could be asked."""
    if engine is None:
        return profile.engine_version
    installed = models_profile.engine_version()
    if installed is None or (engine.version or installed) != installed:
        wanted = f"{engine.name} {engine.version or ''}".rstrip()
        here = f"{engine.name} {installed}" if installed else f"no {engine.name}"
        raise EngineUnavailable(
            f"{wanted} was asked for and {here} is installed: caches are traced, not guessed",
            hint=f"pip install {wanted.replace(' ', '==')} where the planner runs, or leave engine out",
            field="engine.version",
        )
    return installed


def _method_names(names: Sequence[str] | None, world: World) -> tuple[str, ...] | None:
    """Names of methods or labels of variants that exist, ready or fenced; the planner gives a fenced one's reason."""
    if names is None:
        return None
    labels = {variant.label for _, variant in world.loaded.variants}
    known = sorted({*known_names(world), *labels})
    for name in names:
        if name not in known:
            raise no_such_method(name, known, field="methods")
    return tuple(names)

"""Answers of this process, for when there is no daemon: the same rooms, the same params, marked as local."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant import local, views
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.config import Config, load
from veloxquant.planner.snapshot import NoRecords
from veloxquant.wire.messages import convert_params

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.local import World
    from veloxquant.methods.registry import Loaded
    from veloxquant.wire.answers import RecordPage
    from veloxquant.wire.messages import RecordsParams


class LocalPlanner:
    """Keeps loaded plugins from one call to the next; looks at machine and records anew each time."""

    def __init__(self, config: Config | None = None) -> None:
        """`config` None means the user's own; raises ConfigInvalid then."""
        self._config = load() if config is None else config
        self._loaded: Loaded | None = None

    def answer(self, method: str, params: Mapping[str, Any], left_s: float) -> Any:
        """The call's result as a value; a trace leaves room for the rest. Raises what the daemon would answer."""
        deadline = time.monotonic() + left_s
        typed = convert_params(method, params)
        known: dict[str, Any] = {} if method in _PLANNED else {"records": NoRecords(), "calibrations": {}}
        world = local.open_world(_within(self._config, left_s), loaded=self._loaded, **known)
        self._loaded = world.loaded
        left_s = max(_LEAST_TRACE_S, _TRACE_SHARE * (deadline - time.monotonic()))
        return _ANSWERS[method](typed, replace(world, config=_within(self._config, left_s)))


def _records(params: RecordsParams, world: World) -> RecordPage:
    database = BenchmarkDatabase(local.records_directory(world.config))
    return views.records(
        params, database.records.values(), database.skipped, directory=database.storage_dir, generation=0
    )


def _within(config: Config, left_s: float) -> Config:
    trace = msgspec.structs.replace(config.trace, timeout_s=min(config.trace.timeout_s, left_s))
    return msgspec.structs.replace(config, trace=trace)


_TRACE_SHARE, _LEAST_TRACE_S = 0.75, 0.1
"""Of the time that is left, so that a plan by the static reader can still follow a trace that took too long."""
_PLANNED = ("plan", "fit")
"""Calls whose answer rests on records and calibrations; the others read neither, and need not warn."""
_ANSWERS: dict[str, Callable[[Any, World], Any]] = {
    "plan": local.plan,
    "fit": local.fit,
    "methods": views.methods,
    "hardware": views.hardware,
    "records": _records,
}

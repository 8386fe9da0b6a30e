"""What each call gives back, as typed values; docs/protocol.md word for word.

`plan`, `fit` and `hardware` answer with the values of their own rooms (planner.result.Plan, the fit table,
profiles.HardwareProfile) and are not repeated here. Fields are added, never removed or retyped, within protocol 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from veloxquant.profiles import HardwareProfile


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`hello`: who answers, and in which of the client's versions."""

    server: str
    version: str
    protocol: int
    capabilities: tuple[str, ...]
    pid: int
    generation: int


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """`ping`."""

    pong: bool = True
    pid: int
    generation: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`explain`: sentences with the arithmetic of one variant of a plan."""

    plan_id: str
    label: str | None
    lines: tuple[str, ...]


class MethodRow(msgspec.Struct, frozen=True, kw_only=True):
    """One method. `state` is "ready" or "quarantined"; a quarantined one says why and has no variants."""

    name: str
    state: str
    version: str | None = None
    summary: str = ""
    paper: str = ""
    source: str | None = None
    """Distribution the method came from."""
    variants: tuple[Mapping[str, Any], ...] = ()
    """{"label", "params"} for each; with figures where one method was asked for (methods.describe)."""
    batchable: bool | None = None
    trimmable: bool | None = None
    drops_tokens: bool | None = None
    reason: str | None = None
    idea: str = ""
    keeps: str = ""
    """What stays in full precision."""
    fused_attention: bool | None = None
    parameters: tuple[Mapping[str, Any], ...] = ()
    """{"name", "kind", "default", "low", "high", "choices", "help"} for each, where one method was asked for."""


class MethodList(msgspec.Struct, frozen=True, kw_only=True):
    """`methods`."""

    generation: int
    methods: tuple[MethodRow, ...]


class SkippedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the benchmark directory that is not used, and why."""

    file: str
    reason: str


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """`records`: one page; `total` counts all that match the filters."""

    generation: int
    directory: str
    total: int
    offset: int
    records: tuple[Mapping[str, Any], ...]
    skipped_total: int
    skipped: tuple[SkippedRecord, ...] = ()


class MethodsState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of methods, and the quarantined ones with their reasons."""

    ready: int
    quarantined: Mapping[str, str] = {}


class RecordsState(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark directory as the daemon last saw it. `watcher` is "native", "scan only" or "off"."""

    directory: str
    used: int
    skipped: int
    scan_age_s: float
    watcher: str
    newest_age_s: float | None = None
    """Age of the newest record by its own date, negative when that lies ahead; None without one."""


class ClientsState(msgspec.Struct, frozen=True, kw_only=True):
    """Connections."""

    now: int
    peak: int
    subscribed: int
    refused: int
    """Turned away: another user, or too many."""


class RequestsState(msgspec.Struct, frozen=True, kw_only=True):
    """Calls since start; times from the frame's arrival to its answer, over the last few thousand calls."""

    total: int
    by_method: Mapping[str, int]
    errors: Mapping[str, int]
    p50_ms: float | None
    p99_ms: float | None
    slow: int = 0
    """Calls that took longer than daemon.slow_call_ms; the log names each."""


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """Remembered answers of the current generation."""

    entries: int
    bytes: int
    hits: int
    misses: int


class TracesState(msgspec.Struct, frozen=True, kw_only=True):
    """Model traces: in worker processes, waiting for one, done since start."""

    running: int
    waiting: int
    done: int
    failed: int


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon process. `engine_modules` names engine packages it has imported: none, ever."""

    rss_bytes: int | None
    fds: int | None
    fd_limit: int | None
    threads: int
    engine_modules: tuple[str, ...]
    tasks: int | None = None
    """Unfinished tasks of the event loop, the one that answers included; a handful when no client waits."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status`. `warnings` are sentences for people."""

    schema: str = "veloxquant.status/1"
    server: str
    version: str
    protocol: int
    pid: int
    uptime_s: float
    generation: int
    socket: str
    log_file: str | None = None
    config_path: str | None
    hardware: HardwareProfile
    methods: MethodsState
    records: RecordsState
    clients: ClientsState
    requests: RequestsState
    cache: CacheState
    traces: TracesState
    process: ProcessState
    warnings: tuple[str, ...] = ()


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics`: counts and gauges in Prometheus' text exposition format, ended by a newline."""

    content_type: str
    text: str


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """`reload`: the generation now served, and what was wrong (the old config is kept when the new one is)."""

    generation: int
    changed: bool
    warnings: tuple[str, ...] = ()


class Subscribed(msgspec.Struct, frozen=True, kw_only=True):
    """`subscribe` and `unsubscribe`: the topics now listened to."""

    topics: tuple[str, ...]


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """`shutdown`: accepted; the socket goes within the drain time."""

    stopping: bool = True
    drain_s: float


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a subscriber gets: first `full` with every topic it listens to, then what changed, the latest state only.

    `event` is "state", "changed" or "stopping".
    """

    event: str
    generation: int
    full: bool = False
    topics: tuple[str, ...] = ()
    state: Mapping[str, Any] = {}

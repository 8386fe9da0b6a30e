"""`metrics`: what `status` knows as numbers, in Prometheus' text exposition format 0.0.4.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (read 2026). Names follow its conventions: base
units, `_total` for counters. What the system does not tell is left out. Series are only ever added.
"""

from __future__ import annotations

import itertools
import platform
import time
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.daemon.counters import BOUNDS_S
from veloxquant.wire.answers import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from veloxquant.daemon.counters import Durations
    from veloxquant.wire.answers import Status

CONTENT_TYPE = "text/plain; version=0.0.4"
_WATCHER_STATES = ("native", "scan only", "off")


class _Sample(NamedTuple):
    value: float | None
    labels: Mapping[str, str] = {}
    suffix: str = ""


class _Family(NamedTuple):
    name: str
    kind: str
    help: str
    samples: Iterable[_Sample]


def render(status: Status, durations: Mapping[str, Durations]) -> Metrics:
    """The daemon's numbers as a scraper reads them."""
    families = (*_process(status), *_requests(status, durations), *_world(status))
    return Metrics(content_type=CONTENT_TYPE, text="".join(map(_text, families)))


def _process(status: Status) -> Iterator[_Family]:
    process, clients = status.process, status.clients
    build = {"version": status.version, "protocol": str(status.protocol), "python": platform.python_version()}
    yield _family("build_info", "gauge", "Which daemon this is; always 1.", _Sample(1, build))
    yield _family("start_time_seconds", "gauge", "Start of the daemon, Unix time.", time.time() - status.uptime_s)
    yield _family("resident_memory_bytes", "gauge", "Resident memory of the daemon.", process.rss_bytes)
    yield _family("open_fds", "gauge", "Open file descriptors.", process.fds)
    yield _family("max_fds", "gauge", "Most file descriptors that may be open.", process.fd_limit)
    yield _family("threads", "gauge", "Threads of the daemon.", process.threads)
    yield _family("clients", "gauge", "Connected clients.", clients.now)
    yield _family("clients_peak", "gauge", "Most clients at once since the start.", clients.peak)
    yield _family("clients_subscribed", "gauge", "Clients that listen to changes.", clients.subscribed)
    yield _family("clients_refused_total", "counter", "Clients of other users, or too many.", clients.refused)
    yield _family("warnings", "gauge", "Sentences that status shows as warnings.", len(status.warnings))


def _requests(status: Status, durations: Mapping[str, Durations]) -> Iterator[_Family]:
    requests, cache, traces = status.requests, status.cache, status.traces
    yield _family("requests_total", "counter", "Requests answered, by method.", *_by("method", requests.by_method))
    yield _family(
        "errors_total", "counter", "Requests answered with an error, by its name.", *_by("name", requests.errors)
    )
    yield _family("slow_requests_total", "counter", "Requests above daemon.slow_call_ms.", requests.slow)
    buckets = itertools.chain.from_iterable(_histogram(method, one) for method, one in sorted(durations.items()))
    yield _family("request_duration_seconds", "histogram", "From a request's arrival to its answer.", *buckets)
    yield _family("answer_cache_entries", "gauge", "Remembered answers.", cache.entries)
    yield _family("answer_cache_bytes", "gauge", "What remembered answers hold.", cache.bytes)
    yield _family("answer_cache_hits_total", "counter", "Questions answered from memory.", cache.hits)
    yield _family("answer_cache_misses_total", "counter", "Questions that had to be worked out.", cache.misses)
    now = {"running": traces.running, "waiting": traces.waiting}
    yield _family("traces_in_progress", "gauge", "Models being traced, and waiting for it.", *_by("state", now))
    ended = {"done": traces.done, "failed": traces.failed}
    yield _family("traces_total", "counter", "Models traced since the start.", *_by("result", ended))


def _world(status: Status) -> Iterator[_Family]:
    records, methods = status.records, status.methods
    counts = {"used": records.used, "skipped": records.skipped}
    offered = {"ready": methods.ready, "quarantined": len(methods.quarantined)}
    watcher = {state: int(state == records.watcher) for state in _WATCHER_STATES}
    yield _family("generation", "gauge", "Changes of what answers depend on, since the start.", status.generation)
    yield _family("methods", "gauge", "Methods on offer, and quarantined ones.", *_by("state", offered))
    yield _family("records", "gauge", "Benchmark records that are used, and skipped files.", *_by("state", counts))
    yield _family("records_scan_age_seconds", "gauge", "Since the records were last read.", records.scan_age_s)
    yield _family("records_newest_age_seconds", "gauge", "Age of the newest record.", records.newest_age_s)
    yield _family(
        "watcher_state", "gauge", "How changes of records are noticed: 1 for one state.", *_by("state", watcher)
    )


def _family(name: str, kind: str, text: str, *values: _Sample | float | None) -> _Family:
    samples = [one if isinstance(one, _Sample) else _Sample(one) for one in values]
    return _Family(f"veloxquant_{name}", kind, text, samples)


def _by(label: str, counts: Mapping[str, int]) -> Iterator[_Sample]:
    return (_Sample(count, {label: value}) for value, count in sorted(counts.items()))


def _histogram(method: str, durations: Durations) -> Iterator[_Sample]:
    """Buckets are cumulative in this format."""
    reached = list(itertools.accumulate(durations.counts))
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), reached, strict=True):
        yield _Sample(count, {"method": method, "le": bound}, "_bucket")
    yield _Sample(durations.total_s, {"method": method}, "_sum")
    yield _Sample(reached[-1], {"method": method}, "_count")


def _text(family: _Family) -> str:
    """The family's lines; nothing at all where no value is known."""
    known = [one for one in family.samples if one.value is not None]
    if not known:
        return ""
    head = f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
    return head + "".join(f"{family.name}{one.suffix}{_labels(one.labels)} {one.value!r}\n" for one in known)


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

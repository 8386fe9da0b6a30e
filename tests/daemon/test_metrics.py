"""`metrics`: Prometheus reads it, every number is the one that `status` has, and buckets add up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.daemon import metrics
from veloxquant.daemon.counters import BOUNDS_S, Counters
from veloxquant.profiles import HardwareProfile
from veloxquant.wire import answers

if TYPE_CHECKING:
    from daemon_kit import Daemon

# The grammar of https://prometheus.io/docs/instrumenting/exposition_formats/, one line of it.
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
VALUE = r"(?:[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|Inf)|NaN)"
LINE = re.compile(
    rf"# HELP ({NAME}) (?:[^\\\n]|\\[\\n])*|# TYPE ({NAME}) (?:counter|gauge|histogram|summary|untyped)"
    rf"|({NAME})(?:{{{LABEL}(?:,{LABEL})*}})? {VALUE}"
)


def status(**changes: Any) -> answers.Status:
    """A daemon of round figures."""
    made = answers.Status(
        server="veloxquant",
        version="0.1.0",
        protocol=1,
        pid=1,
        uptime_s=100.0,
        generation=118,
        socket="/d.sock",
        config_path=None,
        hardware=HardwareProfile(),
        methods=answers.MethodsState(ready=12, quarantined={"foo": "no"}),
        records=answers.RecordsState(directory="/r", used=842, skipped=3, scan_age_s=4.5, watcher="scan only"),
        clients=answers.ClientsState(now=3, peak=17, subscribed=2, refused=1),
        requests=answers.RequestsState(
            total=7, by_method={"plan": 5, "ping": 2}, errors={"timeout": 2}, p50_ms=0.1, p99_ms=0.9, slow=4
        ),
        cache=answers.CacheState(entries=40, bytes=100_000, hits=12_000, misses=900),
        traces=answers.TracesState(running=1, waiting=0, done=12, failed=6),
        process=answers.ProcessState(rss_bytes=48 * 2**20, fds=14, fd_limit=8192, threads=6, engine_modules=()),
        warnings=("one", "two"),
    )
    return msgspec.structs.replace(made, **changes)


def held_to_the_grammar(text: str) -> dict[str, float]:
    """Each sample by its name and labels; every line is one the format knows, families are whole and in one piece."""
    samples: dict[str, float] = {}
    begun: list[str] = []
    assert text.endswith("\n")
    for line in text.splitlines():
        found = LINE.fullmatch(line)
        assert found, line
        if line.startswith("# HELP"):
            begun.append(found[1])
        elif line.startswith("# TYPE"):
            assert found[2] == begun[-1]
        else:
            assert found[3].startswith(begun[-1])
            name, _, value = line.rpartition(" ")
            assert name not in samples
            samples[name] = float(value)
    assert len(begun) == len(set(begun))
    return samples


def test_every_number_is_the_one_of_status() -> None:
    """A sample for each count, with the labels that tell counts apart."""
    samples = held_to_the_grammar(metrics.render(status(), {}).text)
    expected = {
        "veloxquant_generation": 118,
        'veloxquant_methods{state="ready"}': 12,
        'veloxquant_methods{state="quarantined"}': 1,
        'veloxquant_records{state="used"}': 842,
        'veloxquant_records{state="skipped"}': 3,
        "veloxquant_records_scan_age_seconds": 4.5,
        'veloxquant_watcher_state{state="scan only"}': 1,
        'veloxquant_watcher_state{state="native"}': 0,
        'veloxquant_watcher_state{state="off"}': 0,
        "veloxquant_clients": 3,
        "veloxquant_clients_peak": 17,
        "veloxquant_clients_subscribed": 2,
        "veloxquant_clients_refused_total": 1,
        'veloxquant_requests_total{method="plan"}': 5,
        'veloxquant_requests_total{method="ping"}': 2,
        'veloxquant_errors_total{name="timeout"}': 2,
        "veloxquant_slow_requests_total": 4,
        "veloxquant_answer_cache_entries": 40,
        "veloxquant_answer_cache_bytes": 100_000,
        "veloxquant_answer_cache_hits_total": 12_000,
        "veloxquant_answer_cache_misses_total": 900,
        'veloxquant_traces_in_progress{state="running"}': 1,
        'veloxquant_traces_in_progress{state="waiting"}': 0,
        'veloxquant_traces_total{result="done"}': 12,
        'veloxquant_traces_total{result="failed"}': 6,
        "veloxquant_resident_memory_bytes": 48 * 2**20,
        "veloxquant_open_fds": 14,
        "veloxquant_max_fds": 8192,
        "veloxquant_threads": 6,
        "veloxquant_warnings": 2,
    }
    assert samples.items() >= expected.items()
    left = {name for name in samples if name not in expected}
    assert {re.sub(r"\{.*", "", name) for name in left} == {"veloxquant_build_info", "veloxquant_start_time_seconds"}


def test_what_is_not_known_is_left_out() -> None:
    """No value is invented: a system that does not tell has no such series."""
    process = answers.ProcessState(rss_bytes=None, fds=None, fd_limit=None, threads=6, engine_modules=())
    text = metrics.render(status(process=process), {}).text
    assert "resident" not in text
    assert "fds" not in text
    assert "newest_age" not in text


def test_a_duration_falls_into_the_first_bucket_that_holds_it() -> None:
    """Bounds are inclusive, buckets cumulative, and the last one holds all."""
    counters = Counters()
    for seconds in (0.00005, 0.0001, 0.00010001, 0.3, 99.0):
        counters.answered("plan", seconds)
    samples = held_to_the_grammar(metrics.render(status(), counters.durations).text)
    series = "veloxquant_request_duration_seconds"

    def bucket(bound: str) -> float:
        return samples[f'{series}_bucket{{method="plan",le="{bound}"}}']

    assert [bucket(one) for one in ("0.0001", "0.00025", "0.25", "0.5", "10.0", "+Inf")] == [2, 3, 3, 4, 4, 5]
    assert samples[f'{series}_count{{method="plan"}}'] == 5
    assert samples[f'{series}_sum{{method="plan"}}'] == pytest.approx(99.30025001)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_buckets_never_fall_and_end_at_the_count(times: list[float]) -> None:
    """Whatever was measured; each bucket counts by definition those at or below its bound."""
    counters = Counters()
    for seconds in times:
        counters.answered("fit", seconds)
    samples = held_to_the_grammar(metrics.render(status(), counters.durations).text)
    for bound in BOUNDS_S if times else ():
        name = f'veloxquant_request_duration_seconds_bucket{{method="fit",le="{bound}"}}'
        assert samples[name] == sum(one <= bound for one in times)


@given(st.text(max_size=20))
def test_any_text_can_be_a_label(text: str) -> None:
    """Quotes, backslashes and newlines are escaped, and read back as they were."""
    escaped = metrics._escaped(text)
    assert re.fullmatch(r'(?:[^"\\\n]|\\["\\n])*', escaped)
    back = re.sub(r"\\(.)", lambda one: {"n": "\n"}.get(one[1], one[1]), escaped)
    assert back == text


def test_prometheus_reads_it(shared: Daemon) -> None:
    """The parser of the client library takes what a running daemon says: same families, kinds and values."""
    parser = pytest.importorskip("prometheus_client.parser", reason="not installed: pip install prometheus_client")
    shared.call("ping")
    answer = shared.call("metrics")
    assert answer["content_type"] == "text/plain; version=0.0.4"
    read = list(parser.text_string_to_metric_families(answer["text"]))
    families = {one.name: one for one in read}
    assert len(families) == len(read)
    kinds = re.findall(r"# TYPE (\S+) (\S+)", answer["text"])
    assert {name.removesuffix("_total"): kind for name, kind in kinds} == {
        name: one.type for name, one in families.items()
    }
    own = held_to_the_grammar(answer["text"])
    assert sum(len(one.samples) for one in families.values()) == len(own)
    assert sum(one.value for family in families.values() for one in family.samples) == pytest.approx(sum(own.values()))


def test_the_page_on_the_protocol_shows_a_series_that_exists() -> None:
    """Its example is a part of a real answer."""
    page = (Path(__file__).parents[2] / "docs/protocol.md").read_text(encoding="utf-8")
    (line,) = (one for one in page.splitlines() if '"content_type"' in one)
    assert msgspec.json.decode(line)["result"]["text"] in metrics.render(status(), {}).text

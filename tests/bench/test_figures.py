"""Benches judge honestly: a missed target is called missed, growth is called growth."""

from __future__ import annotations

import io
import socket

import plan_client
import plan_latency
import pytest
import soak


def readings(resident: list[float], files: int = 12, last_files: int | None = None) -> list[soak.Reading]:
    """One reading a minute."""
    found = [soak.Reading(60.0 * n, mib, files, 3) for n, mib in enumerate(resident)]
    if last_files is not None:
        half = len(found) // 2
        found = [*found[:half], *(soak.Reading(one.at_s, one.resident_mib, last_files, 3) for one in found[half:])]
    return found


def test_a_target_is_met_or_missed() -> None:
    """The verdict beside a figure compares it with its target."""
    assert "target 150 us: met" in plan_latency.Figure("p50", 149.0, "us", 150).line()
    assert "target 150 us: MISSED" in plan_latency.Figure("p50", 151.0, "us", 150).line()
    assert "target" not in plan_latency.Figure("p50", 151.0, "us").line()


def test_percentiles() -> None:
    """The 50th and 99th of 0..100 are 50 and 99."""
    assert [plan_latency.percentile([float(n) for n in range(101)], rank) for rank in (50, 99)] == [50, 99]


def test_a_flat_run_passes() -> None:
    """Memory that rises while caches fill and then stays is no leak."""
    assert soak.verdict(readings([40.0, 45, 50, *[52.0] * 20]), minutes=23) == []


def test_a_leak_is_found() -> None:
    """Memory that keeps rising, or files that stay open, fail the soak by name."""
    (leak,) = soak.verdict(readings([40.0 + n for n in range(24)]), minutes=24)
    assert leak.startswith("resident_mib grew by 12")
    (files,) = soak.verdict(readings([50.0] * 24, last_files=99), minutes=24)
    assert files.startswith("files grew by 87")


def test_too_short_a_run_says_nothing() -> None:
    """Without two readings a quarter there is no verdict to give, and that is a failure."""
    assert soak.verdict(readings([50.0] * 7), minutes=0.1) != []


def test_an_answer_may_come_in_pieces() -> None:
    """A client waits for the newline, and says so when the daemon hangs up before it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"res')
        theirs.sendall(b'ult":1}\n')
        assert plan_client.read_line(ours) == b'{"result":1}\n'
        theirs.sendall(b"half")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match="closed"):
            plan_client.read_line(ours)


def test_each_question_of_the_bench_is_another() -> None:
    """The file of new questions holds no question twice."""
    lines = io.BytesIO(plan_latency.requests(100)).readlines()
    assert len(set(lines)) == 100

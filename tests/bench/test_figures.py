"""Benches judge honestly: a missed target is called missed."""

from __future__ import annotations

import io
import socket

import plan_client
import plan_latency
import pytest


def test_a_target_is_met_or_missed() -> None:
    """The verdict beside a figure compares it with its target."""
    assert "target 150 us: met" in plan_latency.Figure("p50", 149.0, "us", 150).line()
    assert "target 150 us: MISSED" in plan_latency.Figure("p50", 151.0, "us", 150).line()
    assert "target" not in plan_latency.Figure("p50", 151.0, "us").line()


def test_percentiles() -> None:
    """The 50th and 99th of 0..100 are 50 and 99."""
    assert [plan_latency.percentile([float(n) for n in range(101)], rank) for rank in (50, 99)] == [50, 99]


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

"""Figures as people read them: a number, its unit, and a dash where nothing is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate, Evidence

UNKNOWN = "-"
_HIGH, _MEDIUM = 0.8, 0.5


def size(size_bytes: float | None) -> str:
    """Bytes in the largest binary unit."""
    return UNKNOWN if size_bytes is None else format_size(size_bytes)


def rate(tokens_per_s: float | None) -> str:
    """Tokens a second, three digits."""
    return UNKNOWN if tokens_per_s is None else f"{short(tokens_per_s)} tok/s"


def milliseconds(value: float | None) -> str:
    """Milliseconds, three digits."""
    return UNKNOWN if value is None else f"{short(value)} ms"


def short(value: float) -> str:
    """Three significant digits, thousands marked."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 -- three digits


def trust(confidence: float) -> str:
    """A confidence of 0..1 in a word."""
    return "high" if confidence >= _HIGH else "medium" if confidence >= _MEDIUM else "low"


def evidence(candidate: Candidate) -> str:
    """Where a candidate's three groups of figures are from, and how far to trust the weakest of each."""
    speed = candidate.speed
    known = speed.decode_tok_s is not None or speed.latency_ms_per_token is not None
    shown = [
        f"cache {_source(candidate.memory.evidence)}",
        f"speed {_source(speed.evidence) if known else _unknown(speed.evidence)}",
        f"quality {_source(candidate.quality.evidence)}",
    ]
    return "; ".join(shown)


def _source(evidence: Evidence) -> str:
    return f"{evidence.source}{''.join(f' {record}' for record in evidence.record_ids)} ({trust(evidence.confidence)})"


def _unknown(evidence: Evidence) -> str:
    """That there is no figure, and the reason that the notes begin with."""
    return f"unknown ({evidence.notes[0]})" if evidence.notes else "unknown"

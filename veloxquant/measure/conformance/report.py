"""Outcomes as a table, method by architecture, and the sentences behind it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from veloxquant.measure.conformance.models import architectures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from veloxquant.measure.conformance.outcome import Outcome

LEGEND = "passed/refused/failed checks; refused: no layer takes the method's cache"


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A head and a row for each variant: for each architecture passed/refused/failed, or that all is refused."""
    seen = {outcome.architecture for outcome in outcomes}
    names = [name for name in architectures() if name in seen]
    variants = sorted({(outcome.method, outcome.label) for outcome in outcomes})
    body = []
    for method, label in variants:
        mine = [outcome for outcome in outcomes if outcome.label == label and outcome.method == method]
        cells = [_cell([outcome for outcome in mine if outcome.architecture == name]) for name in names]
        body.append([method, label, *cells])
    return [["METHOD", "VARIANT", *names], *body]


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    count = Counter(outcome.status for outcome in outcomes)
    layers = next((outcome for outcome in outcomes if outcome.check == "layers"), None)
    if layers is not None and layers.status == "refused" and not count["failed"]:
        return "refused"
    return f"{count['passed']}/{count['refused']}/{count['failed']}"


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each failed check."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    return [f"{one.label} on {one.architecture}, {one.check}: {one.sentence}" for one in failed]


def reasons(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each refusal and each check that does not apply, alike ones of an architecture together."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for one in outcomes:
        if one.status in ("refused", "not_applicable"):
            word = "refused" if one.status == "refused" else "not applicable"
            labels = told.setdefault((one.architecture, word, one.sentence), [])
            labels += [one.label] if one.label not in labels else []
    return [f"{where}, {word} ({_some(labels)}): {why}" for (where, word, why), labels in told.items()]


def _some(labels: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(labels[:most])
    return shown if len(labels) <= most else f"{shown} and {len(labels) - most} more"

"""The soak as a picture: memory, descriptors and p99 over the run, as an SVG written without a plotting library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from soak_verdict import Sample

WIDTH, PANEL, GAP = 860, 190, 46
LEFT, RIGHT, TOP = 64, 16, 40
_FONT = 'font-family="sans-serif" font-size="12"'
_COLOURS = ("#1f4e9c", "#b35900", "#888888")


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `series`: names with their values, one for each time."""

    title: str
    unit: str
    series: tuple[tuple[str, tuple[float, ...]], ...]
    logarithmic: bool = False


def panels(samples: Sequence[Sample]) -> list[Panel]:
    """The three questions: does memory grow, do files stay open, do answers get slower."""

    def of(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(one, name)) for one in samples)

    return [
        Panel("resident memory", "MiB", (("RSS", of("rss_mib")),)),
        Panel("open", "count", (("descriptors", of("fds")), ("clients", of("clients")), ("tasks", of("tasks")))),
        Panel(
            "p99 of each window, seen by one client",
            "ms",
            (("plan", of("plan_p99_ms")), ("ping", of("ping_p99_ms")), ("control (no daemon)", of("control_p99_ms"))),
            logarithmic=True,
        ),
    ]


def ticks(low: float, high: float) -> list[float]:
    """Round values between the two, some five of them."""
    step = 10 ** math.floor(math.log10((high - low) / 2))
    while (high - low) / step > 6:
        step *= 2 if f"{step:e}"[0] in "15" else 2.5
    first = math.ceil(low / step)
    return [round(n * step, 10) for n in range(first, int(high / step) + 1)]


def draw(samples: Sequence[Sample], title: str, path: Path) -> None:
    """Write the picture."""
    minutes = [one.at_s / 60 for one in samples]
    shown = panels(samples)
    height = TOP + len(shown) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {_FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, panel in enumerate(shown):
        parts += _panel(panel, minutes, TOP + number * (PANEL + GAP))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(panel: Panel, minutes: list[float], top: float) -> list[str]:
    values = [value for _, series in panel.series for value in series]
    low, high = _range(values, logarithmic=panel.logarithmic)
    last = max(minutes[-1], 1e-9)

    def x(minute: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * minute / last

    def y(value: float) -> float:
        at = math.log10(max(value, 1e-6)) if panel.logarithmic else value
        return top + PANEL - PANEL * (at - low) / (high - low)

    bottom = top + PANEL
    parts = [f'<text x="{LEFT}" y="{top - 6}" fill="#333">{escape(panel.title)}, {panel.unit}</text>']
    marks = [10.0**n for n in range(math.ceil(low), int(high) + 1)] if panel.logarithmic else ticks(low, high)
    for mark in marks:
        parts.append(f'<path d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    parts += [
        f'<text x="{x(mark):.1f}" y="{bottom + 16}" text-anchor="middle">{mark:g} min</text>' for mark in ticks(0, last)
    ]
    parts.append(f'<path d="M{LEFT} {top}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>')
    for number, (name, series) in enumerate(panel.series):
        colour = _COLOURS[number]
        points = " ".join(f"{x(m):.1f},{y(v):.1f}" for m, v in zip(minutes, series, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        at = WIDTH - RIGHT - 150 * (len(panel.series) - number)
        parts.append(f'<text x="{at}" y="{top - 6}" fill="{colour}">{escape(name)}</text>')
    return parts


def _range(values: list[float], *, logarithmic: bool) -> tuple[float, float]:
    """Where the axis begins and ends; whole powers of ten where it is logarithmic."""
    low, high = min(values), max(values)
    if logarithmic:
        ends = math.floor(math.log10(max(low, 1e-6))), math.ceil(math.log10(max(high, 1e-6)))
        return ends[0], max(ends[1], ends[0] + 1)
    low = 0.0 if low < high / 2 else low - 0.1 * (high - low)
    return low, high + max(0.05 * (high - low), 1e-3 * abs(high), 1e-9)

"""The plots of a profile as SVG for a page: real text, and colours by name, so that the page can change them.

Each function gives one figure, or None where there is nothing to draw. Matplotlib is imported when the first is drawn.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.ctl import figures
from veloxquant.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from veloxquant.ctl.profile_result import Profile
    from veloxquant.measure.measurement import Run

SERIES = 8
"""Colours that the page defines: --s0 to --s7; from the ninth method on they come again, dashed."""
_WIDTH, _HEIGHT = 4.3, 3.2
"""Inches of 72 units: about as many as a phone has pixels, so that a letter of 9 units has 10 pixels there."""
_BAR, _LEGEND_ROW = 0.34, 0.19
_LONGEST = 24
_CROWDED = 50
"""Layers from which on points would hide the lines."""
_XLINK = "http://www.w3.org/1999/xlink"

# Matplotlib needs colours; the page needs names. These stand for them until the text is done.
_INK, _LINE = "#0a0b0c", "#0a0b0d"
_STAND_INS = {_INK: "currentColor", _LINE: "var(--line)"} | {f"#0a0c{n:02x}": f"var(--s{n})" for n in range(SERIES)}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}


class Plot(NamedTuple):
    """One figure: its SVG, and what it shows, with units."""

    svg: str
    title: str
    caption: str


def plots(result: Profile) -> list[Plot]:
    """Memory over tokens, time per layer, and the methods side by side."""
    made = (_memory(result), _layers(result), _resident(result), _speed(result))
    return [one for one in made if one is not None]


def _memory(result: Profile) -> Plot | None:
    runs = [one for one in result.found.runs if one.timeline]
    if not runs:
        return None
    most = max(max(one.peak_bytes, one.true_fp16_bytes) for one in runs)
    unit_bytes, unit = _unit(most)

    def draw(axes: Any) -> None:
        for number, one in enumerate(runs):
            tokens = [sample.tokens for sample in one.timeline]
            held = [sample.resident_bytes / unit_bytes for sample in one.timeline]
            axes.plot(tokens, held, drawstyle="steps-pre", label=_short(one.label), **_look(number))
        given = runs[0]
        end = given.prompt_tokens + given.generated_tokens
        line = [0, given.true_fp16_bytes / unit_bytes]
        axes.plot([0, end], line, color=_INK, linewidth=1, linestyle=":", label="K and V in 16 bits")
        axes.set(xlabel="tokens in the cache", ylabel=f"resident ({unit})", xlim=(0, None), ylim=(0, None))

    caption = (
        f"What the caches hold as tokens come in, in {unit}, unused slots included. "
        "Dotted: the K and V that were given, at two bytes a number."
    )
    return Plot(_figure("memory", draw, named=len(runs) + 1), "Memory over tokens", caption)


def _layers(result: Profile) -> Plot | None:
    runs = [one for one in result.found.runs if any(layer.n_quantize_calls for layer in one.report.layers)]
    if not runs:
        return None

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for number, one in enumerate(runs):
            seen = [(at, layer) for at, layer in enumerate(one.report.layers) if layer.n_quantize_calls]
            times = [1000 * layer.quantize_ms_mean for _, layer in seen]
            marker = "o" if len(seen) < _CROWDED else None
            axes.plot([at for at, _ in seen], times, marker=marker, ms=3, label=_short(one.label), **_look(number))
        axes.set(xlabel="layer", ylabel="mean of one call (µs)", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    caption = (
        "Mean time of one update of a layer's cache in microseconds, over prompt and text, profiled: "
        "layers compare with each other, not with the speed."
    )
    return Plot(_figure("layers", draw, named=len(runs)), "Time of each layer", caption)


def _resident(result: Profile) -> Plot | None:
    runs = list(result.found.runs)
    if not runs:
        return None
    unit_bytes, unit = _unit(max(one.resident_bytes for one in runs))
    values = [one.resident_bytes / unit_bytes for one in runs]
    shown = [format_size(one.resident_bytes) for one in runs]
    caption = f"What each method's caches held when the text ended, in {unit}. Shorter is better."
    return Plot(_bars("resident", runs, values, shown, f"resident ({unit})"), "Memory in the end", caption)


def _speed(result: Profile) -> Plot | None:
    runs = [one for one in result.found.runs if one.ms_per_token is not None]
    if not runs:
        return None
    values = [one.ms_per_token or 0.0 for one in runs]
    shown = [f"{figures.short(value)} ms" for value in values]
    caption = "Time of one decoded token in milliseconds, not profiled. Shorter is better."
    return Plot(_bars("speed", runs, values, shown, "decode (ms a token)"), "Speed", caption)


def _bars(name: str, runs: Sequence[Run], values: Sequence[float], shown: Sequence[str], label: str) -> str:
    def draw(axes: Any) -> None:
        places = range(len(runs))
        bars = axes.barh(places, values, height=0.62, color=[_look(number)["color"] for number in places])
        axes.bar_label(bars, labels=shown, padding=3)
        axes.set_yticks(places, labels=[_short(one.label) for one in runs])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.22)  # room for the figure beside the longest bar
        axes.set(xlabel=label, xlim=(0, None if max(values) else 1))

    return _figure(name, draw, height=max(1.6, 1.0 + _BAR * len(runs)))


def _figure(name: str, draw: Callable[[Any], None], *, height: float = _HEIGHT, named: int = 0) -> str:
    """One pair of axes; with `named` lines, their legend below in two columns."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height + _LEGEND_ROW * max(0, named - 4) / 2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if named:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), name)


def _inline(text: str, name: str) -> str:
    """The svg element alone, sized by the page, with ids that no other figure of the page has."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', rf'<svg \1 xmlns:xlink="{_XLINK}">', text, count=1)
    for stand_in, colour in _STAND_INS.items():
        text = text.replace(stand_in, colour)
    return text


def _look(number: int) -> dict[str, Any]:
    """Colour and line of the n-th method; a second round of colours is dashed."""
    styles = ("-", "--", "-.")
    return {
        "color": f"#0a0c{number % SERIES:02x}",
        "linestyle": styles[number // SERIES % len(styles)],
        "linewidth": 1.8,
    }


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _unit(most_bytes: float) -> tuple[int, str]:
    """The largest binary unit that the value fills."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most_bytes >= 1024**power:
            return 1024**power, unit
    return 1, "bytes"

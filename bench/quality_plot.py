"""The frontier of bytes and quality: which rows nothing else beats, and a picture of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Rows = list[dict[str, Any]]

_LEAST_KL = 1e-5
"""What is drawn for less: rounding of the 16-bit row."""


def frontier(rows: Rows) -> Rows:
    """Rows with a smaller KL than every row of as few or fewer bits, fewest bits first."""
    best: Rows = []
    for row in sorted(rows, key=lambda row: (row["bits"], row["kl_mean"])):
        if not best or row["kl_mean"] < best[-1]["kl_mean"]:
            best.append(row)
    return best


def keeping(rows: Rows) -> Rows:
    """Those that keep all tokens."""
    return [row for row in rows if not row.get("drops_tokens")]


def reached(rows: Rows, bits: float) -> dict[str, Any] | None:
    """The row of the smallest KL with at most so many bits a number (two decimals count)."""
    fitting = [row for row in rows if round(row["bits"], 2) <= bits]
    return min(fitting, key=lambda row: row["kl_mean"], default=None)


def draw(rows: Rows, targets: Sequence[tuple[float, float]], path: Path) -> None:
    """An SVG with mlx-lm's cache, ours and the targets; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    own = [row for row in rows if row["label"].startswith("mlx-lm")]
    others = [row for row in rows if row not in own and row["label"] != "16 bit"]
    ours = keeping(others)
    dropping = [row for row in others if row not in ours]
    with mpl.rc_context({"svg.hashsalt": "veloxquant", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*_points(frontier(own)), "s-", color="#b35900", label="mlx-lm's quantized cache")
        axes.plot(*_points(ours), "o", color="#9db8d9", markersize=4, label="methods here that keep all tokens")
        axes.plot(*_points(frontier(ours)), "o-", color="#1f4e9c", label="the best of them")
        axes.plot(*_points(dropping), "^", color="#888888", markersize=4, label="methods here that drop tokens")
        axes.plot(*zip(*targets, strict=True), "kx", label="targets")
        for row in frontier(ours):
            place = (row["bits"], max(row["kl_mean"], _LEAST_KL))
            axes.annotate(row["label"], place, textcoords="offset points", xytext=(4, 4), fontsize=6)
        axes.set(
            yscale="log", xlabel="bits a number, all that is held at the last token", ylabel="mean KL, nats a token"
        )
        axes.grid(which="both", alpha=0.2)
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


def _points(rows: Rows) -> tuple[list[float], list[float]]:
    return [row["bits"] for row in rows], [max(row["kl_mean"], _LEAST_KL) for row in rows]

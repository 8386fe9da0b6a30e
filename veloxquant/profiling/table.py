"""A report as text: the documented table, then what the caches really hold.

Units are fixed, so that rows and runs compare: times are means per call in µs with one decimal, sizes of the first
table in MB of 1,000,000 bytes (as `units` reads them) with two; the second table gives bytes. A column is as wide as
documented, or wider where an entry needs it. A label is one printable line, whatever it is made of, and a number that
is no size of anything is given by its bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.profiling.report import LayerProfile, ProfileReport

_MB = 1_000_000
_US = 1e3  # microseconds in a millisecond
_HEADER = ("Layer", "Quantize", "Dequantize", "Memory")
_WIDTHS = (12, 12, 13, 10)
_HELD_HEADER = ("Layer", "Resident", "Peak", "Reported", "16-bit K+V", "Ratio")
_HELD_WIDTHS = (12, 16, 16, 16, 16, 5)
_LABEL = 21
_MOST = 10**18
"""An exabyte, a quintillion tokens: what a cache claims beyond is no measurement, and its digits would fill a page."""

_FIRST = (
    "Above: documented formulas. Quantize and Dequantize are means per call (a fused update_and_fetch is all in",
    "Quantize); Memory is the most a cache ever reported; the ratio takes 2 bytes x key width a token, of one head",
    "and no values; tokens are summed over layers.",
)
_SECOND = (
    "Below: what was held, in bytes of the caches' arrays, walked. Reported is what a cache says of itself; 16-bit K+V",
    "is all that was given, every head and row; Ratio is Resident / 16-bit K+V. Tokens are those of the sequence.",
)


def format_profile_table(report: ProfileReport) -> str:
    """The documented fixed-width table and, where there are layers, its totals and the table of bytes held."""
    documented = _table(_HEADER, _WIDTHS, [_documented(layer) for layer in report.layers])
    if not report.layers:
        return "\n".join(documented)
    held = _table(_HELD_HEADER, _HELD_WIDTHS, [_held(layer) for layer in report.layers])
    return "\n".join(
        [
            *documented,
            documented[1],
            *_totals(report),
            "",
            *_FIRST,
            *_SECOND,
            "",
            *held,
            held[1],
            *_held_totals(report),
        ]
    )


def _table(header: Sequence[str], least: Sequence[int], rows: Sequence[Sequence[str]]) -> list[str]:
    """Header, rule and rows, left-aligned."""
    widths = [
        max(width, *(len(row[column]) + 1 for row in (header, *rows))) if rows else width
        for column, width in enumerate(least)
    ]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    head, *body = (line.rstrip() for line in lines)
    return [head, "-" * sum(widths), *body]


def _documented(layer: LayerProfile) -> tuple[str, ...]:
    return (
        _label(layer),
        f"{layer.quantize_ms_mean * _US:.1f} µs",
        f"{layer.dequantize_ms_mean * _US:.1f} µs",
        _mb(layer.peak_memory_bytes),
    )


def _totals(report: ProfileReport) -> list[str]:
    rate = [("Tokens/sec", f"{report.tokens_per_sec:.1f}")] if report.elapsed_s > 0 else []
    return _labelled(
        [
            ("Total tokens", _whole(report.total_tokens, "")),
            ("Total memory", _mb(report.total_bytes_written)),
            ("Compression ratio", f"{report.overall_compression_ratio:.2f}x"),
            *rate,
        ]
    )


def _held(layer: LayerProfile) -> tuple[str, ...]:
    return (
        _label(layer),
        _whole(layer.resident_bytes),
        _whole(layer.peak_resident_bytes),
        _bytes(layer.reported_bytes),
        _whole(layer.true_fp16_bytes),
        _ratio(layer.resident_ratio),
    )


def _held_totals(report: ProfileReport) -> list[str]:
    rate = [("Tokens/sec", f"{report.sequence_tokens_per_sec:.1f}")] if report.elapsed_s > 0 else []
    return _labelled(
        [
            ("Sequence tokens", _whole(report.sequence_tokens, "")),
            ("Resident", _whole(report.resident_bytes)),
            ("Peak of each layer", _whole(report.peak_resident_bytes)),
            ("Reported", _bytes(report.reported_bytes)),
            ("16-bit K+V", _whole(report.true_fp16_bytes)),
            ("Resident/16-bit", _ratio(report.resident_ratio)),
            *rate,
            *(
                (f"{_label(layer)} lies", f"reports {_whole(layer.reported_difference or 0, '+,')} bytes")
                for layer in report.layers
                if layer.is_lying
            ),
        ]
    )


def _labelled(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{label + ':':<{_LABEL}}{value}" for label, value in rows]


def _label(layer: LayerProfile) -> str:
    """One line that moves no cursor."""
    try:
        text = str(layer.layer_id)
    except Exception:  # noqa: BLE001 -- a stranger's __str__; and Python prints no number of more than 4,300 digits
        text = quoted(layer.layer_id)
    return "Layer " + "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _bytes(size: int | None) -> str:
    return "-" if size is None else _whole(size)


def _mb(size: int) -> str:
    return f"{_beyond(size)} bytes" if abs(size) > _MOST else f"{size / _MB:.2f} MB"


def _whole(number: int, form: str = ",") -> str:
    return _beyond(number) if abs(number) > _MOST else f"{number:{form}}"


def _beyond(number: int) -> str:
    return "over 1e18" if number > 0 else "below -1e18"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio else "-"

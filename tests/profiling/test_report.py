"""Properties of a layer's profile and of a report, from numbers given by hand; and the table made of them."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from veloxquant.errors import InvalidParams
from veloxquant.profiling import LayerProfile, ProfileReport, format_profile_table, profile_layers

ZERO_DEFAULTS = {
    "n_quantize_calls": 0,
    "n_dequantize_calls": 0,
    "quantize_ms_total": 0.0,
    "dequantize_ms_total": 0.0,
    "write_ms_total": 0.0,
    "peak_memory_bytes": 0,
    "tokens_written": 0,
    "fp16_baseline_bytes": 0,
    "is_fused": False,
}


def layer(number: int = 0, **changes: Any) -> LayerProfile:
    """The documented example's row: 12.3 and 8.1 µs a call, 1.2 MB; half of 2.4 MB resident."""
    row: dict[str, Any] = {
        "n_quantize_calls": 128,
        "quantize_ms_total": 128 * 0.0123,
        "n_dequantize_calls": 2,
        "dequantize_ms_total": 2 * 0.0081,
        "peak_memory_bytes": 1_200_000,
        "tokens_written": 128,
        "fp16_baseline_bytes": 8_196_000,
        "true_fp16_bytes": 2_400_000,
        "resident_bytes": 1_200_000,
        "peak_resident_bytes": 1_300_000,
        "reported_bytes": 1_200_000,
        "sequence_tokens": 128,
    }
    return LayerProfile(number, **{**row, **changes})


def test_documented_fields_come_first_with_their_defaults() -> None:
    """Positional construction works as documented; what was added comes after."""
    fields = [field.name for field in dataclasses.fields(LayerProfile)]
    assert fields[: len(ZERO_DEFAULTS) + 1] == ["layer_id", *ZERO_DEFAULTS]
    fresh = dataclasses.asdict(LayerProfile("any"))
    assert {name: fresh[name] for name in ZERO_DEFAULTS} == ZERO_DEFAULTS


def test_means_and_ratios_of_a_layer() -> None:
    """Totals over calls, baseline over peak, resident over true."""
    profile = layer(quantize_ms_total=64.0, dequantize_ms_total=3.0)
    assert (profile.quantize_ms_mean, profile.dequantize_ms_mean) == (0.5, 1.5)
    assert (profile.compression_ratio, profile.resident_ratio) == (6.83, 0.5)


def test_nothing_done_is_zero_everywhere() -> None:
    """No division fails."""
    profile, report = LayerProfile(0), ProfileReport()
    assert (profile.quantize_ms_mean, profile.dequantize_ms_mean) == (0.0, 0.0)
    assert (profile.compression_ratio, profile.resident_ratio) == (0.0, 0.0)
    assert (report.layers, report.elapsed_s, report.total_tokens, report.total_bytes_written) == ([], 0.0, 0, 0)
    assert (report.tokens_per_sec, report.overall_compression_ratio, report.resident_ratio) == (0.0, 0.0, 0.0)
    assert (report.sequence_tokens, report.sequence_tokens_per_sec, report.reported_bytes) == (0, 0.0, 0)


def test_a_peak_below_zero_gives_no_ratio() -> None:
    """As documented: 0.0 where peak_memory_bytes <= 0."""
    assert layer(peak_memory_bytes=-5).compression_ratio == 0.0


def test_totals_are_sums_over_layers() -> None:
    """The documented ones; the ratio is the sum of baselines over the sum of peaks, not a mean of ratios."""
    report = ProfileReport([layer(0), layer(1, fp16_baseline_bytes=0, tokens_written=2)], elapsed_s=2.0)
    assert (report.total_bytes_written, report.total_tokens, report.tokens_per_sec) == (2_400_000, 130, 65.0)
    assert report.overall_compression_ratio == 8_196_000 / 2_400_000


def test_a_report_with_a_silent_layer_has_no_reported_total() -> None:
    """A sum without one of its terms would be a lie."""
    assert ProfileReport([layer(), layer(reported_bytes=None)]).reported_bytes is None
    assert ProfileReport([layer(), layer()]).reported_bytes == 2_400_000


def test_the_resident_ratio_leaves_out_layers_of_which_it_is_not_known() -> None:
    """A recurrent state was given no K and V: its bytes are no part of that ratio."""
    state = layer(1, true_fp16_bytes=0, resident_bytes=99_000_000)
    assert ProfileReport([layer(), state]).resident_ratio == 0.5


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), -0.001, -1, "1", None, True])
def test_a_time_that_did_not_pass_is_refused(wrong: Any) -> None:
    """Wherever it is given, by the name of the field."""
    for make in (lambda: ProfileReport([], wrong), lambda: profile_layers([], elapsed_s=wrong)):
        with pytest.raises(InvalidParams) as caught:
            make()
        assert caught.value.field == "elapsed_s"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.001, "1", None, True, np.float32("nan"), 10**400])
def test_a_time_that_did_not_pass_cannot_be_set_later(wrong: Any) -> None:
    """The time that was there stays, and no rate becomes a NaN."""
    report = ProfileReport([layer()], 2.0)
    with pytest.raises(InvalidParams) as caught:
        report.elapsed_s = wrong
    assert caught.value.field == "elapsed_s"
    assert (report.elapsed_s, report.tokens_per_sec) == (2.0, 64.0)


@pytest.mark.parametrize("seconds", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), Fraction(4, 2)])
def test_any_real_number_of_seconds_is_a_float(seconds: Any) -> None:
    """At the start and later."""
    report = ProfileReport([layer()], seconds)
    later = ProfileReport([layer()])
    later.elapsed_s = seconds
    assert report == later
    assert type(report.elapsed_s) is type(later.elapsed_s) is float
    assert report.tokens_per_sec == 64.0


@pytest.mark.parametrize(
    ("resident", "reported", "lying"),
    [
        (0, 1024, False),
        (0, 1025, True),
        (1025, 0, True),
        (102_400, 102_400 + 1024, False),
        (102_500, 102_500 - 1025, False),
        (102_499, 102_499 - 1025, True),
        (10**9, 10**9 + 10**7, False),
        (10**9, 10**9 + 10**7 + 1, True),
        (10**6, None, False),
    ],
)
def test_a_lie_is_more_than_1024_bytes_and_more_than_a_hundredth(
    resident: int, reported: int | None, lying: bool
) -> None:
    """Either way; the difference itself is exact."""
    profile = layer(resident_bytes=resident, reported_bytes=reported)
    assert profile.is_lying is lying
    assert profile.reported_difference == (None if reported is None else reported - resident)


DOCUMENTED = """\
Layer       Quantize    Dequantize   Memory
-----------------------------------------------
Layer 0     12.3 µs     8.1 µs       1.20 MB
Layer 1     11.8 µs     7.9 µs       1.20 MB
-----------------------------------------------
Total tokens:        256
Total memory:        2.40 MB
Compression ratio:   6.83x
Tokens/sec:          812.4
"""


def two_layers(**changes: Any) -> list[LayerProfile]:
    """Both rows of the documented example."""
    second = {"quantize_ms_total": 128 * 0.0118, "dequantize_ms_total": 2 * 0.0079}
    return [layer(0, **changes), layer(1, **second, **changes)]


def test_the_table_begins_as_documented() -> None:
    """The example's rows and totals, character by character; its 32 layers of 128 tokens are two here."""
    table = format_profile_table(ProfileReport(two_layers(), elapsed_s=256 / 812.4))
    assert table.startswith(DOCUMENTED)


def test_thirty_two_layers_give_the_documented_totals() -> None:
    """32 x 128 tokens and 32 x 1.20 MB, MB of 1,000,000 bytes."""
    lines = format_profile_table(ProfileReport([layer(number) for number in range(32)])).splitlines()
    assert lines[35:38] == ["Total tokens:        4096", "Total memory:        38.40 MB", "Compression ratio:   6.83x"]


def test_the_rate_is_there_only_for_a_time() -> None:
    """Neither table makes one up."""
    assert "Tokens/sec" not in format_profile_table(ProfileReport(two_layers()))
    assert format_profile_table(ProfileReport(two_layers(), 1.0)).count("Tokens/sec:") == 2


def test_no_layers_no_totals() -> None:
    """Header and rule are all."""
    assert format_profile_table(ProfileReport([], 3.0)).splitlines() == DOCUMENTED.splitlines()[:2]


def test_the_second_table_gives_what_is_held_in_bytes() -> None:
    """After a text that says which is which: walked bytes, claims, 16-bit bytes, and the sequence's own tokens."""
    table = format_profile_table(ProfileReport(two_layers(), elapsed_s=2.0))
    _, _, below = table.partition("Below: what was held")
    assert "Above: documented formulas" in table
    rows = {line.split("  ")[0]: line.split() for line in below.splitlines() if line.startswith("Layer ")}
    assert rows["Layer 1"] == ["Layer", "1", "1,200,000", "1,300,000", "1,200,000", "2,400,000", "0.500"]
    totals = dict(re.findall(r"^([^:\n]+): +(\S+)$", below, flags=re.MULTILINE))
    assert totals == {
        "Sequence tokens": "128",
        "Resident": "2,400,000",
        "Peak of each layer": "2,600,000",
        "Reported": "2,400,000",
        "16-bit K+V": "4,800,000",
        "Resident/16-bit": "0.500",
        "Tokens/sec": "64.0",
    }


def test_what_is_not_known_is_a_dash_and_a_lie_is_named() -> None:
    """No ratio and no claim; and the layer whose claim differs, with the difference."""
    table = format_profile_table(ProfileReport([layer(0, true_fp16_bytes=0, reported_bytes=None), layer(1)]))
    assert re.search(r"^Layer 0 +1,200,000 +1,300,000 +- +0 +-$", table, flags=re.MULTILINE)
    assert " lies" not in table
    table = format_profile_table(ProfileReport([layer(0), layer(7, reported_bytes=200_000)]))
    assert table.splitlines()[-1] == "Layer 7 lies:        reports -1,000,000 bytes"


def test_long_labels_times_and_sizes_widen_their_column() -> None:
    """Nothing runs into its neighbour, and columns stay under their headers."""
    long = layer(0, quantize_ms_total=128 * 123456.7, peak_memory_bytes=10**15)
    long.layer_id = "decoder.block.11"
    header, rule, row, *_ = format_profile_table(ProfileReport([long])).splitlines()
    assert row.split("  ") != [row]
    for name, cell in (("Quantize", "123456700.0 µs"), ("Dequantize", "8.1 µs"), ("Memory", "1000000000.00 MB")):
        assert header.index(name) == row.index(cell)
    assert len(rule) >= len(row)


class Unnamed:
    """A label that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("label", ["a\nb", "\x1b[31mred", "\r\x00\u2028\u202e", "\ud800", {"k": "a\tb\nc"}, Unnamed()])
def test_a_label_is_one_printable_line(label: Any) -> None:
    """Line breaks, escape sequences and half characters are spelled out, also where the layer lies."""
    table = format_profile_table(ProfileReport([layer(label, reported_bytes=0)]))
    plain = format_profile_table(ProfileReport([layer("plain", reported_bytes=0)]))
    assert len(table.splitlines()) == len(plain.splitlines())
    assert all(line.isprintable() for line in table.split("\n"))
    table.encode()


def test_what_is_spelled_out_stays_readable() -> None:
    """The rest of a label is as it was."""
    table = format_profile_table(ProfileReport([layer("дом\n2")]))
    assert table.splitlines()[2].startswith(r"Layer дом\n2 12.3 µs")


@pytest.mark.parametrize("size", [10**400, 10**5000, -(10**400)], ids=["large", "unprintable", "negative"])
def test_absurd_claims_neither_fail_nor_fill_the_table(size: int) -> None:
    """Whichever whole number it is: what a stranger's nbytes says reaches the table."""
    names = [name for name, value in vars(layer()).items() if isinstance(value, int) and not isinstance(value, bool)]
    for changes in ({name: size} for name in names if name != "layer_id"):
        table = format_profile_table(ProfileReport([layer(0, **changes)], 2.0))
        assert max(len(line) for line in table.splitlines()) < 130
    bound = "over 1e18" if size > 0 else "below -1e18"
    table = format_profile_table(ProfileReport([layer(0, peak_memory_bytes=size, reported_bytes=size)]))
    assert table.splitlines()[2].endswith(f"{bound} bytes")
    assert table.splitlines()[-1] == f"Layer 0 lies:        reports {bound} bytes"


def test_ratios_of_absurd_numbers_are_infinite_or_zero() -> None:
    """Not an OverflowError, from whole numbers or floats."""
    huge = 10**400
    assert layer(fp16_baseline_bytes=huge, peak_memory_bytes=1).compression_ratio == float("inf")
    assert layer(peak_memory_bytes=huge).compression_ratio == 0.0
    assert layer(n_quantize_calls=huge).quantize_ms_mean == 0.0
    assert layer(peak_memory_bytes=huge, fp16_baseline_bytes=huge).compression_ratio == 1.0
    assert ProfileReport([layer(tokens_written=huge)], 2.0).tokens_per_sec == float("inf")

"""Sizes, counts and times: read exactly, refused with a reason, printed for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import InvalidParams
from veloxquant.units import format_count, format_duration, format_size, parse_count, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("0.1GiB", 107374182),
        ("4.5gib", 9 * 2**29),
        ("1kB", 1000),
        ("2 TiB", 2 * 2**40),
        ("12884901888", 12884901888),
        ("64B", 64),
        (12884901888, 12884901888),
        (0, 0),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    """Binary and decimal units, fractions, plain bytes; 0.1 GiB is 107374182.4 bytes, the fraction dropped."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [("32k", 32768), ("128k", 131072), ("1m", 1048576), ("1M", 1048576), ("1.5k", 1536), ("65,536", 65536), (7, 7)],
)
def test_counts_take_binary_thousands(text: str | int, count: int) -> None:
    """32k is 32768, as context lengths are meant."""
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20", 20), ("1.5", 1.5), ("500ms", 0.5), ("20 s", 20), ("10m", 600), ("2h", 7200), ("1d", 86400)],
)
def test_times(text: str, seconds: float) -> None:
    """Seconds or a unit."""
    assert parse_seconds(text) == seconds


JUNK = [
    "", " ", "GiB", "12G", "12 potatoes", "-1", "-5GiB", "+1", "inf", "nan", "1e9", "0x10", "1.2.3",
    "\uff11\uff12", "9" * 40,
    "1_000", "1,00", "9999999TiB", math.inf, -math.inf, math.nan, 1e300, -1, True, None, 10**5000, -(10**5000),
    [10**5000],
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: "number" if isinstance(junk, (int, list)) else repr(junk)[:12])
@pytest.mark.parametrize("parse", [parse_size, parse_count, parse_seconds], ids=lambda parse: parse.__name__)
def test_junk_is_refused_with_what_why_and_next(parse: object, junk: object) -> None:
    """The error names the field, shows the value, and says what to write."""
    with pytest.raises(InvalidParams) as caught:
        parse(junk, field="some_field")  # type: ignore[operator]
    assert caught.value.field == "some_field"
    assert caught.value.message.startswith("some_field is ")
    assert len(caught.value.message) < 200
    assert "write" in caught.value.hint


def test_a_count_is_whole() -> None:
    """0.3k is 307.2, which is no count."""
    with pytest.raises(InvalidParams, match="not whole"):
        parse_count("0.3k")


@given(st.text(max_size=30))
def test_any_text_gives_a_number_or_the_typed_error(text: str) -> None:
    """No text gets through as anything else."""
    for parse in (parse_size, parse_count, parse_seconds):
        try:
            assert 0 <= parse(text) <= 2**53  # type: ignore[operator]
        except InvalidParams as error:
            assert error.hint  # noqa: PT017 -- either outcome is right


@given(st.integers(0, 2**53))
def test_a_printed_size_reads_back_within_its_precision(size: int) -> None:
    """Three significant digits or more: reading a printed size back is off by less than 1 %."""
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**29, "512 MiB"),
        (2**30 - 1, "1 GiB"),
        (7 * 2**28, "1.75 GiB"),
        (12713103196, "11.8 GiB"),
        (115448725504, "107.5 GiB"),
        (64 * 2**30, "64 GiB"),
        (-4 * 2**30, "-4 GiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(size: int, text: str) -> None:
    """Two decimals below 10, one above, none when they would be zeros."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.4, "400ms"),
        (0.9999, "1s"),
        (12, "12s"),
        (303, "5m 3s"),
        (59.7, "1m"),
        (273600, "3d 4h"),
        (86459, "1d"),
    ],
)
def test_durations_are_printed_in_two_units(seconds: float, text: str) -> None:
    """The two largest units say enough."""
    assert format_duration(seconds) == text


def test_counts_are_printed_with_thousands() -> None:
    """And such a count reads back."""
    assert format_count(262144) == "262,144"
    assert [format_count(count, "line") for count in (0, 1, 2, 1024)] == ["0 lines", "1 line", "2 lines", "1,024 lines"]
    assert parse_count(format_count(262144)) == 262144

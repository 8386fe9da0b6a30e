"""The short way of reading a record gives what the long way gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
from veloxquant.benchmarks.plain_record import read_plain
from veloxquant.errors import RecordInvalid

PLAIN = BenchmarkRecord("a", "fp16", "m/x", throughput_tok_s=33.1, tags=["t"]).to_dict()
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from((2**63, 2**64, 10**400, 4096.0, 0.5, -0.0, 1e308, "", " ", "x", "a\0b", "é", "../x", "\u2028")),
    st.floats(),
    st.lists(st.sampled_from(("x", 1)), max_size=2),
    st.dictionaries(
        st.sampled_from(("batch_size", "context_length", "max_kl", "later")), st.integers(0, 3), max_size=2
    ),
)


def the_long_way(text: str) -> dict[str, Any] | None:
    """As the class itself reads it; None where it refuses."""
    try:
        return BenchmarkRecord.from_dict(json.loads(text)).to_dict()
    except RecordInvalid:
        return None


def exactly(data: dict[str, Any]) -> str:
    """Equal only when types are equal too: 1, 1.0 and true differ."""
    return json.dumps(data)


@given(st.dictionaries(st.sampled_from((*PLAIN, "later")), ODD, max_size=3), st.sets(st.sampled_from(tuple(PLAIN))))
def test_the_short_way_agrees_with_the_long_way(changed: dict[str, Any], left_out: set[str]) -> None:
    """Whatever a field holds or lacks: the same record to the last type, or the judgement is left to the long way."""
    text = json.dumps({key: value for key, value in (PLAIN | changed).items() if key not in left_out})
    found = read_plain(text.encode())
    if found is not None:
        expected = the_long_way(text)
        assert expected is not None
        assert exactly(found.to_dict()) == exactly(expected)


def test_an_ordinary_record_takes_the_short_way() -> None:
    """Whatever we write ourselves, with or without what was not measured."""
    assert read_plain(json.dumps(PLAIN).encode()) == BenchmarkRecord.from_dict(PLAIN)
    assert read_plain(b'{"id": "a", "method": "fp16", "model_id": "m"}') is not None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"id": NaN}', b'{"id":"a","method":"\\ud800","model_id":"m"}']
)
def test_what_is_no_record_is_left_to_the_long_way(data: bytes) -> None:
    """It has the words for what is wrong."""
    assert read_plain(data) is None


def test_records_share_no_list() -> None:
    """Tags of one are not tags of another, though both had none on disk."""
    data = b'{"id": "a", "method": "fp16", "model_id": "m"}'
    one, other = read_plain(data), read_plain(data)
    assert one is not None
    assert other is not None
    assert one.tags == []
    assert one.tags is not other.tags

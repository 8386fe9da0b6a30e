"""Records as JSON lines and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
from veloxquant.benchmarks.exchange import COLUMNS, BadLine, read_lines, write_csv, write_lines
from veloxquant.profiles import WorkloadProfile

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
RECORDS = st.builds(
    BenchmarkRecord,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    method=TEXT.map(lambda text: "m" + text.replace("\0", "")),
    model_id=st.just("org/é"),
    memory_bytes=st.integers(0, 2**63 - 1),
    memory_reduction=st.none() | st.floats(1e-9, 4.0),
    throughput_tok_s=st.floats(0, 1e308),
    perplexity_delta=st.none() | st.floats(-1e308, 1e308),
    workload=st.builds(WorkloadProfile, max_kl=st.none() | st.just(0.1)),
    source=TEXT,
    tags=st.lists(TEXT, max_size=2),
)


@given(st.lists(RECORDS, max_size=4))
def test_json_lines_come_back_equal(records: list[BenchmarkRecord]) -> None:
    """Whatever is in the texts: line breaks, quotes, any script."""
    text = io.StringIO()
    write_lines(records, text)
    found = [one for _, one in read_lines(io.BytesIO(text.getvalue().encode()))]
    assert found == records


def test_each_bad_line_is_named_and_the_others_are_read() -> None:
    """By its number, counted with empty lines, with the field where it is one."""
    good = {"id": "a", "method": "fp16", "model_id": "m", "later": 1}
    lines = [
        "\ufeff" + json.dumps(good),
        "",
        "{",
        json.dumps(good | {"id": "b", "memory_reduction": 5}),
        json.dumps(good | {"id": "c", "tags": ["x" * 70_000]}),
        '{"id": "d", "method": "fp16", "model_id": "m", "throughput_tok_s": NaN}',
        json.dumps(good | {"id": "e"}),
    ]
    stream = io.BytesIO("\n".join(lines).encode())
    found = [one for _, one in read_lines(stream)]
    assert [one.id for one in found if isinstance(one, BenchmarkRecord)] == ["a", "e"]
    bad = {one.line: one.reason for one in found if isinstance(one, BadLine)}
    assert list(bad) == [3, 4, 5, 6]
    assert "not JSON" in bad[3]
    assert "memory_reduction" in bad[4]
    assert "65536 bytes" in bad[5]
    assert "throughput_tok_s" in bad[6]


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reading(data: bytes) -> None:
    """Any file is read to its end."""
    stream = io.BytesIO(data)
    assert all(isinstance(one, BadLine) for _, one in read_lines(stream))
    assert stream.tell() == len(data)


def test_a_spreadsheet_reads_what_was_written() -> None:
    """A column for each field, absent values empty, keys we do not know as JSON in the last."""
    one = BenchmarkRecord.from_dict(
        {"id": "a", "method": "fp16", "model_id": 'm, "x"', "throughput_tok_s": 33.1, "tags": ["p", "q"], "later": [1]}
    )
    text = io.StringIO()
    write_csv([one], text)
    (row,) = csv.DictReader(io.StringIO(text.getvalue()))
    assert tuple(row) == COLUMNS
    assert (row["model_id"], row["throughput_tok_s"], row["memory_reduction"]) == ('m, "x"', "33.1", "")
    assert (row["tags"], row["workload.objective"], json.loads(row["other"])) == ("p q", "balanced", {"later": [1]})


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\tx"])
def test_text_is_no_formula_in_a_spreadsheet(text: str) -> None:
    """A colleague's record runs nothing; numbers below zero stay numbers."""
    stream = io.StringIO()
    write_csv([BenchmarkRecord("a", "fp16", "m", source=text, perplexity_delta=-math.tau)], stream)
    (row,) = csv.DictReader(io.StringIO(stream.getvalue()))
    assert row["source"] == f"'{text}"
    assert float(row["perplexity_delta"]) == -math.tau

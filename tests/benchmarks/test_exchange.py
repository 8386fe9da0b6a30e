"""Records as JSON lines and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
from veloxquant.benchmarks.csv_exchange import COLUMNS, write_csv
from veloxquant.benchmarks.exchange import BadLine, read_lines, read_records, write_lines
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**53) | st.floats(-1e9, 1e9) | TEXT, st.lists, max_leaves=3
)
MARKS = st.lists(st.sampled_from("'=+-@\t\r\n ,;\"x\0"), max_size=5).map("".join)
HARD = st.builds(
    lambda record, further, workload: BenchmarkRecord.from_dict(
        record.to_dict() | further | {"workload": record.to_dict()["workload"] | workload}
    ),
    st.builds(
        BenchmarkRecord,
        id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
        method=MARKS.map(lambda text: text.replace("\0", "") + "m"),
        model_id=st.just("org/é"),
        architecture=TEXT | MARKS,
        context_length=st.integers(1, 2**27),
        memory_bytes=st.integers(0, 2**63 - 1),
        memory_reduction=st.none() | st.floats(1e-9, 4.0) | st.integers(1, 4),
        throughput_tok_s=st.floats(0, 1e308) | st.integers(0, 10**300),
        latency_ms_per_token=st.just(-0.0) | st.floats(0, 1e-300),
        perplexity_delta=st.none() | st.floats(-1e308, 1e308) | st.integers(-9, 9),
        chip=st.sampled_from(("", "unknown", "Apple M4")),
        created_at=TEXT | MARKS,
        source=TEXT | MARKS,
        tags=st.lists(TEXT | MARKS, max_size=3),
        workload=st.builds(
            WorkloadProfile,
            max_kl=st.none() | st.just(0.1),
            max_latency_ms=st.none() | st.floats(0.1, 10),
            batch_size=st.integers(1, 9),
            objective=st.sampled_from(("memory", "balanced")),
        ),
    ),
    st.dictionaries(st.sampled_from(("later", "workload.x", "")), JSON),
    st.dictionaries(st.sampled_from(("later", "x")), JSON),
)


@given(st.lists(HARD, max_size=3))
def test_a_spreadsheets_file_comes_back_exactly(records: list[BenchmarkRecord]) -> None:
    """Numbers in their very spelling, texts that look like formulas, tags with blanks, keys we do not know."""
    text = io.StringIO()
    write_csv(records, text)
    found = [one for _, one in read_records(io.BytesIO(text.getvalue().encode()))]
    assert [repr(one.to_dict()) for one in found if isinstance(one, BenchmarkRecord)] == [
        repr(one.to_dict()) for one in records
    ]
    assert len(found) == len(records)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,fp16,m,4096.5,", "column context_length: '4096.5' is no whole number"),
        ("a,fp16,m,0,", "column context_length: context_length is 0"),
        ('a,fp16,m,1,"33,1"', "column throughput_tok_s: '33,1' is no number"),
        ("a,fp16,m,1,nan", "column throughput_tok_s: 'nan' is no number"),
        ("a,fp16,m,1,1e400", "column throughput_tok_s: throughput_tok_s is inf"),
        ("a,fp16,m", "it has 3 cells, and the header has 5"),
        ("a,fp16,m,1,2,3", "it has 6 cells, and the header has 5"),
        (",fp16,m,1,2", "column id: id is missing"),
        ("a,fp16,\udcff,1,2", "column model_id: "),
    ],
)
def test_a_bad_cell_is_named_and_other_rows_are_read(row: str, said: str) -> None:
    """By line and column; rows before and after it serve."""
    lines = ["id,method,model_id,context_length,throughput_tok_s", 'z,fp16,"two\nlines",1,', row, ",,,,", "b,fp16,m,,7"]
    stream = io.BytesIO("\r\n".join(lines).encode("utf-8", "surrogateescape"))
    first, bad, last = [one for _, one in read_records(stream)]
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.reason[: len(said)]) == (4, said)
    assert isinstance(first, BenchmarkRecord)
    assert isinstance(last, BenchmarkRecord)
    assert (first.model_id, last.context_length, last.throughput_tok_s) == ("two\nlines", 4096, 7)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("id,method,model_id,thoughput_tok_s", "column 'thoughput_tok_s' is not known; did you mean throughput_tok_s?"),
        ("id,method,model_id,zzz", "column 'zzz' is not known; what has no column of its own goes into `other`"),
        ("id,method,model_id,chip,chip", "column 'chip' is there twice"),
        ("id,model_id", "the header has no column method"),
        ("", "the header has no column id"),
    ],
)
def test_a_header_that_is_not_understood_is_told_and_nothing_is_read(header: str, said: str) -> None:
    """A misspelt column would lose a measurement in silence."""
    ((_, bad),) = read_records(io.BytesIO(f"{header}\na,fp16,m,1,2\n".encode()), named_csv=True)
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.reason[: len(said)]) == (1, said)


def test_what_a_spreadsheet_makes_of_it_is_read() -> None:
    """A mark of the encoding, semicolons, quoted and blank columns, other endings of lines; text lost its ' or not."""
    text = '\ufeff"id";"method";"model_id";"source";;\r\na;fp16;m;-x;;\r\nb;fp16;m;\'-x;;\r\n'
    found = [one for _, one in read_records(io.BytesIO(text.encode()))]
    assert [(one.id, one.source) for one in found if isinstance(one, BenchmarkRecord)] == [("a", "-x"), ("b", "-x")]


@given(st.binary(max_size=80))
def test_no_bytes_break_the_reading_of_csv(data: bytes) -> None:
    """Any rows are read to their end."""
    stream = io.BytesIO(b"id,method,model_id\n" + data)
    assert all(isinstance(one, BadLine | BenchmarkRecord) for _, one in read_records(stream))
    assert stream.tell() == len(data) + 19


RESAVED = "id,method,model_id,context_length,memory_reduction,throughput_tok_s,tags\r\na,fp16,é,4096,0.27,12.5,p q\r\n"
PLAIN = BenchmarkRecord("a", "fp16", "é", memory_reduction=0.27, throughput_tok_s=12.5, tags=["p", "q"])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(RESAVED.encode("utf-16"), id="UTF-16"),
        pytest.param(("\ufeff" + RESAVED).encode("utf-16-be"), id="UTF-16, the other way round"),
        pytest.param(RESAVED.replace("\r\n", "\r").encode(), id="CR alone"),
        pytest.param(("sep=,\r\n" + RESAVED).encode(), id="sep"),
        pytest.param(('\ufeff"sep=;"\r\n' + RESAVED.replace(",", ";")).encode(), id="sep, quoted, with a mark"),
        pytest.param(RESAVED.replace("id,method", "ID,Method").encode(), id="another case"),
        pytest.param(RESAVED.replace("4096", "4096.0").encode(), id="whole number with a point"),
        pytest.param(RESAVED.replace(",", ";").replace(".", ",").encode(), id="decimal commas"),
        pytest.param(RESAVED.replace(",", ";").replace("4096", "4096,00").encode(), id="whole number with a comma"),
        pytest.param(RESAVED.replace(",", "\t").encode("utf-16"), id="Unicode text"),
    ],
)
@pytest.mark.parametrize("named_csv", [True, False])
def test_what_a_spreadsheet_saved_again_is_the_same(data: bytes, named_csv: bool) -> None:
    """Its encoding, its ends of lines, its separators, its case and its numbers; the values are exact."""
    ((seen, found),) = read_records(io.BytesIO(data), named_csv=named_csv)
    assert isinstance(found, BenchmarkRecord)
    assert found == replace(PLAIN, created_at=found.created_at)
    assert type(found.context_length) is int
    assert seen == len(data)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\r\na,", "\r\n1.23E+15,", "column id: '1.23E+15' is what a spreadsheet made of an id"),
        (",p q", ",1/31/2026 12:00", "column created_at: '1/31/2026 12:00' is no ISO 8601 time"),
        (",p q", ",31.01.2026 12:00", "column created_at: '31.01.2026 12:00' is no ISO 8601 time"),
        ("0.27", '"0,27"', "column memory_reduction: '0,27' is no number"),
        ("4096", "4096.5", "column context_length: '4096.5' is no whole number"),
        ("0.27", "27%", "column memory_reduction: '27%' is no number"),
    ],
)
def test_what_a_spreadsheet_spoilt_is_refused(old: str, new: str, said: str) -> None:
    """By line and column: digits that are gone, a day that may be a month, a comma that may part thousands."""
    text = (
        RESAVED.replace("tags", "created_at").replace(",p q", ",2026-01-31").replace(",2026-01-31", new, old == ",p q")
    )
    ((_, bad),) = read_records(io.BytesIO(text.replace(old, new).encode()))
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.reason[: len(said)]) == (2, said)


def test_ids_and_times_of_any_form_come_back() -> None:
    """What looks spoilt and is not: an id in hexadecimal digits, a record whose time was written by hand."""
    records = [replace(PLAIN, id=name, created_at=at) for name, at in (("1e-5", "1/31/2026"), ("1E15", "yesterday"))]
    text = io.StringIO()
    write_csv(records, text)
    assert [one for _, one in read_records(io.BytesIO(text.getvalue().encode()))] == records


def test_half_a_character_is_refused_by_its_field() -> None:
    """A UTF-16 file cut in a surrogate pair, or one byte short."""
    whole = "id,method,model_id\na,fp16,m😀".encode("utf-16")
    for short in (1, 2, 3):
        ((_, bad),) = read_records(io.BytesIO(whole[:-short]))
        assert isinstance(bad, BadLine)
        assert bad.reason.startswith("column model_id")

"""Closeness of two measurements, axis by axis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.benchmarks.matching import THRESHOLD, chip_factor, reach, size_factor, version_factor
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

CHIPS = st.builds(
    lambda generation, tier: f"Apple M{generation}{tier}", st.integers(1, 12), st.sampled_from(("", " Pro", " Max"))
) | st.sampled_from(("unknown", "M4", "AMD EPYC 7M12", "Intel m3-7Y32", "", "M0", "M4 Maximum"))
VERSIONS = st.builds(lambda *n: ".".join(map(str, n)), *[st.integers(0, 40)] * 3) | st.sampled_from(("unknown", "main"))
RECORDS = st.builds(
    BenchmarkRecord,
    id=st.text("abc", min_size=1),
    method=st.just("fp16"),
    model_id=st.just("m/x"),
    context_length=st.integers(1, 2**27),
    batch_size=st.integers(1, 2**16),
    chip=CHIPS,
    mlx_version=VERSIONS,
    workload=st.builds(WorkloadProfile, num_concurrent_requests=st.integers(1, 64)),
)


@given(RECORDS, RECORDS)
def test_a_score_is_in_0_to_1_and_symmetric(a: BenchmarkRecord, b: BenchmarkRecord) -> None:
    """Which of two records asks does not matter."""
    assert 0.0 <= a.match_score(b) <= 1.0
    assert a.match_score(b) == pytest.approx(b.match_score(a))


@given(RECORDS, st.lists(st.integers(1, 2**20), min_size=3, max_size=3).map(sorted), st.sampled_from(("up", "down")))
def test_a_score_falls_along_each_axis(record: BenchmarkRecord, steps: list[int], way: str) -> None:
    """All else equal, a record further off in context, in sequences, in generation or in version never scores more."""
    at, near, far = steps if way == "up" else [2**20 + 1 - step for step in steps]

    def scores(name: str, values: Sequence[object], **others: object) -> list[float]:
        asked, *answers = (replace(record, **({name: value} | others)) for value in values)
        return [answer.match_score(replace(asked, id="asked", source="another")) for answer in answers]

    one = {"workload": WorkloadProfile()}
    chips = [f"Apple M{1 + step % 12}" for step in (0, *sorted((near % 12, far % 12)))]
    versions = [f"0.{minor}.1" for minor in (0, *sorted((near % 50, far % 50)))]
    for found in (
        scores("context_length", (at, near, far)),
        scores("batch_size", tuple(min(step, 2**16) for step in (at, near, far)), **one),
        scores("chip", chips),
        scores("mlx_version", versions),
    ):
        assert 0.0 <= found[1] <= found[0] * (1 + 1e-12)


@given(RECORDS)
def test_a_record_matches_itself_perfectly(record: BenchmarkRecord) -> None:
    """Even on an unknown chip: it is the same one."""
    assert record.match_score(record) == 1.0


@given(RECORDS)
def test_a_perfect_match_scores_1(record: BenchmarkRecord) -> None:
    """Same context, sequences, known chip and known version; what is not stated does not count."""
    record.chip, record.mlx_version = "Apple M4 Max", "0.32.4"
    query = BenchmarkMatchQuery(
        "fp16", "m/x", "llama", record.context_length, record.sequences, "m4 max", "0.32.4", "26.1"
    )
    assert record.match_score(query) == 1.0
    assert record.match_score(BenchmarkMatchQuery("fp16", "m/x", chip="any", mlx_version="any")) == 1.0


@given(st.lists(st.floats(1, 2**30), min_size=3, max_size=3).map(sorted))
def test_a_size_further_away_never_scores_higher(sizes: list[float]) -> None:
    """Monotone in the ratio of contexts and of batches."""
    near, middle, far = sizes
    assert size_factor(near, middle) >= size_factor(near, far) <= size_factor(middle, far)


def test_an_impossible_size_scores_nothing() -> None:
    """A negative context matches nothing, least of all itself."""
    assert size_factor(-4096, -4096) == size_factor(4096, 0) == size_factor(float("nan"), 4096) == 0.0


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_chip_generation_further_away_never_scores_higher(base: int, near: int, further: int) -> None:
    """M1 and M10 are far apart."""
    one, two = (chip_factor(f"M{base}", f"M{base + step}") for step in (near, near + further))
    assert one >= two
    assert chip_factor("M1", "M10") < THRESHOLD


def test_chip_tiers_count() -> None:
    """M4, M4 Pro and M4 Max, with 120, 273 and 546 GB/s, are not one machine, and each step costs more."""
    steps = [chip_factor("M4", chip) for chip in ("Apple M4", "M4 Pro", "M4 Max", "M4 Ultra")]
    assert steps[0] == 1.0
    assert steps == sorted(set(steps), reverse=True)
    assert steps[1] < THRESHOLD


@pytest.mark.parametrize("other", ["AMD EPYC 7M12", "Intel(R) Core(TM) m3-7Y32", "M3 Maximum", "Xeon", "CM3"])
def test_chips_that_are_no_apple_chips_are_unrelated_to_one(other: str) -> None:
    """Names are parsed, not searched; an equal name is still equal."""
    assert chip_factor("M3", other) < min(chip_factor("M3", "M12 Ultra"), THRESHOLD)
    assert chip_factor(other, other.upper()) == 1.0


def test_unknown_equals_nothing() -> None:
    """Two unknown chips may be two machines, and two unknown versions two versions."""
    assert chip_factor("unknown", "unknown") == chip_factor("M4", "") < 1.0
    assert version_factor("unknown", "unknown") == version_factor("0.32.4", "unknown") < 1.0


@pytest.mark.parametrize("theirs", ["unknown", "Apple M4", "AMD EPYC 7M12"])
@pytest.mark.parametrize("ours", ["unknown", "", " UNKNOWN "])
def test_a_record_of_no_known_origin_never_passes(ours: str, theirs: str) -> None:
    """All else equal, on any machine, and whichever of the two is the unknown one."""
    asked = BenchmarkMatchQuery("fp16", "m/x", context_length=4096, batch_size=1, chip=theirs, mlx_version="0.32.4")
    record = BenchmarkRecord("a", "fp16", "m/x", chip=ours, mlx_version="0.32.4")
    assert record.match_score(asked) < THRESHOLD
    record.chip, asked = asked.chip, replace(asked, chip=ours)
    assert record.match_score(asked) < THRESHOLD


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 3), min_size=3, max_size=3, unique=True).map(sorted))
def test_a_version_further_away_never_scores_higher(versions: list[tuple[int, int, int]]) -> None:
    """0.31 is closer to 0.32 than 0.20 is, and a patch closer than a minor version."""
    low, middle, high = (".".join(map(str, version)) for version in versions)
    assert 1.0 > version_factor(low, middle) >= version_factor(low, high)
    assert version_factor(middle, high) >= version_factor(low, high)


def test_version_steps() -> None:
    """Any patch is closer than any minor version, any minor than any major."""
    order = ["0.32.4", "0.32.5", "0.32.99", "0.33.0", "0.39.4", "1.0", "3.0"]
    factors = [version_factor("0.32.4", other) for other in order]
    assert factors == sorted(set(factors), reverse=True)
    assert version_factor("0.32", "0.32.0") == 1.0


@given(st.floats(0.01, 1.0), st.floats(1, 2**20))
def test_reach_is_where_the_size_alone_falls_below_the_threshold(threshold: float, size: float) -> None:
    """Nothing that could pass is left out by looking only within reach."""
    assert size_factor(size, size * reach(threshold)) == pytest.approx(threshold, abs=1e-6)
    assert size_factor(size, size * reach(threshold)) <= threshold
    assert reach(0.0) == float("inf")

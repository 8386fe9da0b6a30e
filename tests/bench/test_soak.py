"""The soak judges honestly: growth is called growth, with what the samples cannot decide said beside it."""

from __future__ import annotations

import itertools
import math
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import soak
import soak_plot
import soak_verdict
from soak_verdict import Sample

if TYPE_CHECKING:
    from pathlib import Path

BASE = Sample(
    at_s=0.0,
    rss_mib=50.0,
    fds=70,
    threads=9,
    tasks=5,
    clients=58,
    generation=1,
    requests=0,
    plan_p50_ms=0.5,
    plan_p99_ms=10.0,
    ping_p50_ms=0.1,
    ping_p99_ms=1.0,
    control_p50_ms=0.05,
    control_p99_ms=0.5,
    daemon_p99_ms=5.0,
    cpu_percent=20.0,
    load=1.0,
    trouble=0,
)
HOUR = [replace(BASE, at_s=10.0 * n, generation=1 + n) for n in range(361)]
QUIET = (BASE, BASE)


def failed(samples: list[Sample], quiet: tuple[Sample, Sample] = QUIET) -> list[str]:
    """What of the claims does not hold."""
    return [one.what for one in soak_verdict.claims(samples, quiet) if not one.met]


def test_a_flat_run_passes() -> None:
    """Memory that rises while pools and caches fill, and then stays, is no leak."""
    filling = [replace(one, rss_mib=min(40.0 + one.at_s / 60, 52.0)) for one in HOUR]
    assert failed(filling) == []


def test_a_world_that_stands_still_is_no_soak() -> None:
    """Memory is then flat whatever a change would leave behind: one window in which nothing changed is enough."""
    slept = [replace(one, generation=min(one.generation, 300 + (one.generation > 310))) for one in HOUR]
    assert failed(slept) == ["windows without a change of the world"]
    once = [replace(one, generation=one.generation - (one.generation > 300)) for one in HOUR]
    assert [one.value for one in soak_verdict.claims(once, QUIET) if not one.met] == [1]


def test_each_record_published_stays_for_a_while(monkeypatch: pytest.MonkeyPatch, short_folder: Path) -> None:
    """Over several rounds of the lengths: each publication changes what there is, and so many are there in the end."""
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(short_folder / "benchmarks"))
    background = soak.Background(None, None, 1.0)  # type: ignore[arg-type]
    there: list[frozenset[str]] = []
    for number in range(7 * soak.RECORDS_KEPT):
        background._publish(number)
        there.append(frozenset(background._published))
        assert there[-1] == set(background._database.records)
    assert all(before != after for before, after in itertools.pairwise(there))
    assert len(there[-1]) == soak.RECORDS_KEPT


def noise(count: int, size: float) -> list[float]:
    """Independent and normal, of this standard deviation, the same each time."""
    dice = random.Random(7)  # noqa: S311 -- noise
    return [dice.gauss(0, size) for _ in range(count)]


def test_a_leak_of_memory_is_found() -> None:
    """A slope of 1 MiB an hour under noise of 0.1 MiB is found, and lies in its own interval."""
    leaking = [
        replace(one, rss_mib=50 + one.at_s / 3600 + extra) for one, extra in zip(HOUR, noise(361, 0.1), strict=True)
    ]
    assert failed(leaking) == ["slope of resident memory"]
    claim = soak_verdict.memory(soak_verdict.warm(leaking))
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low < 1.0 < claim.high


def test_an_interval_that_reaches_beyond_the_target_is_said() -> None:
    """Waves that last are not independent samples: a slope within the target is not called certain."""
    waves = [replace(one, rss_mib=50 + 0.4 * one.at_s / 3600 + 0.3 * math.cos(one.at_s / 191)) for one in HOUR]
    claim = soak_verdict.memory(waves)
    assert claim.met
    assert claim.note == "the interval reaches beyond the target"


def test_a_fit_is_that_of_the_formulas() -> None:
    """Slope by hand (3 / 5); no error on a line; of independent errors, sigma / sqrt(sum of squares), to a third."""
    slope, _ = soak_verdict.fitted([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 2.0])
    assert slope == pytest.approx(0.6)
    assert soak_verdict.fitted([0.0, 1.0, 2.0, 3.0], [3.0, 5.0, 7.0, 9.0]) == pytest.approx((2.0, 0.0))
    at = [float(n) for n in range(400)]
    _, error = soak_verdict.fitted(at, noise(400, 1.0))
    assert error == pytest.approx(1 / math.sqrt(sum((n - 199.5) ** 2 for n in at)), rel=1 / 3)


@pytest.mark.parametrize(
    ("name", "found"),
    [("fds", "open files left behind"), ("tasks", "tasks left behind"), ("threads", "threads left behind")],
)
def test_what_stays_behind_is_found(name: str, found: str) -> None:
    """One more file, task or thread after the load than before it is a leak."""
    assert failed(HOUR, (BASE, replace(BASE, **{name: getattr(BASE, name) + 1}))) == [found]


def test_open_files_that_grow_are_found() -> None:
    """Clients come and go; what is open beside them must not grow."""
    growing = [replace(one, fds=70 + n // 60, clients=58 + n % 3) for n, one in enumerate(HOUR)]
    assert "open files beside clients, growth" in failed(growing)
    moving = [replace(one, fds=70 + n // 60, clients=58 + n // 60) for n, one in enumerate(HOUR)]
    assert failed(moving) == []


def test_drift_of_p99_is_found_and_stands_beside_the_machines() -> None:
    """Plans 20 % slower at p99 late in the run fail, with the drift of the control beside the figure."""
    slower = [replace(one, plan_p99_ms=12.0 if one.at_s > 2700 else 10.0, control_p99_ms=0.5) for one in HOUR]
    assert failed(slower) == ["drift of plan's p99"]
    (claim, _) = soak_verdict.drifts(soak_verdict.warm(slower))
    assert claim.value == pytest.approx(20.0)
    assert "the control, which never touches the daemon, drifted by +0.0%" in claim.note


def test_a_wrong_answer_fails_the_soak() -> None:
    """One is too many."""
    assert failed([*HOUR[:-1], replace(HOUR[-1], trouble=1)]) == ["answers wrong or missing"]


def test_too_short_a_run_says_nothing() -> None:
    """Without eight samples after the warm-up there is no verdict to give, and that is a failure."""
    assert failed(HOUR[:6]) == ["samples after the warm-up"]


def test_quantiles_are_nearest_ranks() -> None:
    """Of 0..99 ms the 99th percentile is 99; of nothing there is none."""
    assert soak.quantile_ms([1000 * n for n in range(100)], 0.99) == 99.0
    assert soak.quantile_ms([], 0.99) == 0.0


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    """Well-formed, three panels, a point for each sample, all inside."""
    file = tmp_path / "docs" / "soak.svg"
    wavy = [replace(one, rss_mib=50 + n % 7, plan_p99_ms=1 + n % 90) for n, one in enumerate(HOUR)]
    soak_plot.draw(wavy, "an hour <b>", file)
    root = ET.parse(file).getroot()  # noqa: S314 -- our own file
    width, height = (float(one) for one in root.attrib["viewBox"].split()[2:])
    lines = [one.attrib["points"].split() for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 1 + 3 + 3
    for points in lines:
        assert len(points) == len(HOUR)
        places = [tuple(map(float, point.split(","))) for point in points]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 60), (48.2, 53.9), (0, 0.37), (3, 1e4)])
def test_axes_have_a_few_round_marks(low: float, high: float) -> None:
    """Three to seven of them, all within the axis, evenly spaced."""
    marks = soak_plot.ticks(low, high)
    assert 3 <= len(marks) <= 7
    assert all(low <= one <= high for one in marks)

"""The nearest records among many: levels are walked from the best on, and left where nothing better can follow.

What a record could score at best is known from its chip, its version and its sequences before its run is opened, and
on each of these levels the worth falls with the distance on either side. Whether a record is of the right model is
asked only of one that would be the best so far.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.benchmarks import sorted_run
from veloxquant.benchmarks.fingerprint import UNKNOWN
from veloxquant.benchmarks.matching import (
    OCTAVE_COST,
    UNSTATED,
    chip_factor,
    numbers_factor,
    reach,
    size_factor,
    version_factor,
    version_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from veloxquant.benchmarks.matching import Numbers
    from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
    from veloxquant.benchmarks.sorted_run import Entry, Run

    Accepts = Callable[[BenchmarkRecord], bool]

Scored = tuple[float, "BenchmarkRecord"]
_ROUNDING = 1.0 + 1e-9
"""Products of the same factors in another order differ by less."""
_LITTLE = 0.01
"""A score for which sizes may be any ratio apart."""
_Found = tuple[float, float, str, "BenchmarkRecord"]
"""Minus the score, minus the time in seconds, id, record: the least is the best."""
_Runs = dict[str, "Run"]


def version_key(numbers: Numbers) -> Numbers:
    """A release with its builds, or all its patches: they are worth nearly the same, and are asked one by one."""
    return (*numbers[:2], min(numbers[2], 1))


class Machine(NamedTuple):
    """What was measured on one chip: how many runs there are of each label, and the runs.

    Versions in order of their numbers, below each the sequences, below these the runs by label.
    """

    labels: dict[str, int]
    versions: Run


NO_MACHINE = Machine({}, ())
Branch = tuple[str, bool, Machine]
"""The chip, whether the version is of the very word that was asked for, and what is below."""


class Asked(NamedTuple):
    """What is asked for, the score from 0 to 1 that is enough, and what a score is worth here."""

    query: BenchmarkMatchQuery
    threshold: float
    factor: float = 1.0

    def near(self) -> tuple[float, float]:
        """The contexts that alone do not rule a record out."""
        if self.query.context_length == UNSTATED:
            return 0.0, math.inf
        ratio = reach(self.threshold / self.factor)
        return self.query.context_length / ratio, self.query.context_length * ratio


class _Memo(dict[Any, float]):
    """Factors by what they are of, each computed once."""

    def __init__(self, rule: Callable[[Any], float]) -> None:
        self._rule = rule

    def __missing__(self, key: Any) -> float:
        self[key] = made = self._rule(key)
        return made


class _Factors:
    """What each value on an axis is worth to one question."""

    def __init__(self, asked: BenchmarkMatchQuery) -> None:
        numbers, context = version_numbers(asked.mlx_version), asked.context_length
        unnumbered = version_factor(UNKNOWN, asked.mlx_version)
        self.chips = _Memo(lambda chip: chip_factor(chip or UNKNOWN, asked.chip))
        self.version = () if numbers is None else version_key(numbers)
        self.versions = _Memo(
            lambda one: (
                unnumbered
                if not one or numbers is None
                else 1.0
                if one == self.version
                else numbers_factor(one, numbers)
            )
        )
        self.exact = _Memo(lambda one: version_factor(one, asked.mlx_version))
        self.rows = asked.sequences
        self.sequences = _Memo(lambda count: 1.0 if asked.sequences == UNSTATED else size_factor(count, self.rows))
        self.contexts = _Memo(lambda length: 1.0 if context == UNSTATED else size_factor(length, context))

    def ranked(self, branches: list[Branch], least: float) -> list[tuple[float, bool, Machine]]:
        """Branches by the factor of their chip, the best first; those below the least are left out."""
        ranked = [(self.chips[chip], is_word, machine) for chip, is_word, machine in branches]
        return sorted((one for one in ranked if one[0] * _ROUNDING >= least), key=lambda one: one[0], reverse=True)

    def by_version(self, is_word: bool, machine: Machine) -> Iterator[tuple[float, Run]]:
        """Versions by their keys, the best first, with the most that one is worth."""
        if is_word:
            return ((1.0, by_sequences) for _, by_sequences in sorted_run.upwards(machine.versions, ((),)))
        return _outwards(machine.versions, self.version, self.versions)

    def by_sequences(self, run: Run) -> Iterator[tuple[float, _Runs]]:
        """Numbers of sequences, the best first."""
        return _outwards(run, self.rows, self.sequences)


def _outwards(run: Run, at: Any, factors: _Memo) -> Iterator[tuple[float, Any]]:
    """Entries from `at` outwards, whose factors fall on either side: the greatest factor first."""
    up, down = sorted_run.upwards(run, (at,)), sorted_run.downwards(run, (at,))
    above, below = next(up, None), next(down, None)
    high = -1.0 if above is None else factors[above[0]]
    low = -1.0 if below is None else factors[below[0]]
    while above is not None or below is not None:
        if above is not None and high >= low:
            yield high, above[1]
            above = next(up, None)
            high = -1.0 if above is None else factors[above[0]]
        elif below is not None:
            yield low, below[1]
            below = next(down, None)
            low = -1.0 if below is None else factors[below[0]]


def every(label: str, branches: list[Branch], asked: Asked, accepts: Accepts) -> list[Scored]:
    """Every record of one label that reaches the threshold, best first; of equals the newest, then by id."""
    factors = _Factors(asked.query)
    low, high = asked.near()
    found: dict[str, _Found] = {}
    for run in _within_reach(label, branches, asked, factors):
        for entry in sorted_run.upwards(run, (low,)):
            if entry[0] > high:
                break
            score = asked.factor * entry[3].match_score(asked.query)
            if score >= asked.threshold and entry[2] not in found and accepts(entry[3]):
                found[entry[2]] = (-score, *entry[1:4])
    return [(-minus, record) for minus, _, _, record in sorted(found.values(), key=_rank)]


def _within_reach(label: str, branches: list[Branch], asked: Asked, factors: _Factors) -> Iterator[Run]:
    """Runs of a label that could reach the threshold."""
    least = asked.threshold / asked.factor
    for chip, is_word, machine in factors.ranked(branches, least):
        versions = factors.by_version(is_word, machine) if label in machine.labels else ()
        for factor, by_sequences in _reaching(chip, versions, least):
            ranked = _reaching(factor, factors.by_sequences(by_sequences), least)
            yield from (runs[label] for _, runs in ranked if label in runs)


def _reaching(factor: float, ranked: Iterable[tuple[float, Any]], least: float) -> Iterator[tuple[float, Any]]:
    """Those that with this factor are worth the least, with both in one; the ranked ones come best first."""
    for further, below in ranked:
        if factor * further * _ROUNDING < least:
            return
        yield factor * further, below


def best(
    branches: list[Branch],
    asked: Asked,
    accepts: Accepts,
    wanted: frozenset[str] | None,
    unwanted: frozenset[str] = frozenset(),
) -> dict[str, BenchmarkRecord]:
    """The first that `every` would give, for each label; the query states a context."""
    search = _Search(asked, accepts)
    ranked = search.factors.ranked(branches, asked.threshold / asked.factor)
    there = {label for _, _, machine in ranked for label in machine.labels}
    search.missing = (there if wanted is None else there & wanted) - unwanted
    search.wanted = frozenset(search.missing)
    for chip, is_word, machine in ranked:
        if search.is_over(chip):
            break
        if search.wanted_at(chip, machine.labels):
            search.look(chip, is_word, machine)
    return {label: one[-1] for label, one in search.found.items()}


class _Search:
    """The best found so far of each label that is wanted, and what could still be better."""

    def __init__(self, asked: Asked, accepts: Accepts) -> None:
        self.factors = _Factors(asked.query)
        self.wanted: frozenset[str] = frozenset()
        self.missing: set[str] = set()
        self.found: dict[str, _Found] = {}
        self._asked = asked
        self._accepts = accepts
        self._near = asked.near()
        self._worst = math.inf
        """The least score of those found, or less."""

    def is_over(self, factor: float) -> bool:
        """Whether nothing with this factor at most is of use."""
        bound = self._asked.factor * factor * _ROUNDING
        return bound < self._asked.threshold or (bound < self._worst and not self.missing)

    def wanted_at(self, factor: float, there: dict[str, Any]) -> Any:
        """Which of the labels that are there could be bettered."""
        wanted = self.missing if self._asked.factor * factor * _ROUNDING < self._worst else self.wanted
        return wanted & there.keys()

    def look(self, chip: float, is_word: bool, machine: Machine) -> None:
        """At the runs of one chip, the best machines first."""
        for version, by_sequences in self.factors.by_version(is_word, machine):
            factor = chip * version
            if self.is_over(factor):
                return
            for rows, runs in self.factors.by_sequences(by_sequences):
                if self.is_over(factor * rows):
                    break
                self._row(runs, chip, version, rows)
            self._worst = -max((one[0] for one in self.found.values()), default=-math.inf)

    def _row(self, runs: _Runs, chip: float, version: float, rows: float) -> None:
        """Those of one machine and number of sequences: into most runs a look at two contexts is enough."""
        factor = chip * version * rows
        bound = self._asked.factor * factor * _ROUNDING
        context, least = self._asked.query.context_length, self._asked.threshold
        for label in self.wanted_at(factor, runs):
            now = self.found.get(label)
            enough = least if now is None else -now[0]
            if bound < enough:
                continue
            run = runs[label]
            if len(run) == 1 and enough > _LITTLE:
                chunk, ratio = run[0], 2.0 ** ((bound / enough - 1.0) / OCTAVE_COST)
                at = bisect_left(chunk, (context,))
                is_far_above = at == len(chunk) or chunk[at][0] > context * ratio
                if is_far_above and (at == 0 or chunk[at - 1][0] * ratio < context):
                    continue
            self._open(label, run, chip, version, rows)

    def _open(self, label: str, run: Run, chip: float, version: float, rows: float) -> None:
        context, least = self._asked.query.context_length, self._near[0]
        before = self.found.get(label)
        now = before
        for entries in (sorted_run.upwards(run, (context,)), _below(run, context, least)):
            now = self._first(entries, chip, version, rows, now)
        if now is not None and now is not before:
            self.found[label] = now
            self.missing.discard(label)
            self._worst = min(self._worst, -now[0])

    def _first(
        self, entries: Iterator[Entry], chip: float, version: float, rows: float, now: _Found | None
    ) -> _Found | None:
        """The best of these, the nearest first, that is accepted, where it is better than what is there now."""
        asked, factors = self._asked, self.factors
        for entry in entries:
            context = factors.contexts[entry[0]]
            most = asked.factor * (chip * version * context * rows) * _ROUNDING
            if most < asked.threshold or (now is not None and most < -now[0]):
                break
            exact = factors.exact[entry[3].mlx_version]
            score = asked.factor * (chip * exact * context * rows)
            if score < asked.threshold or (now is not None and (-score, *entry[1:3]) >= now[:3]):
                if exact == version:
                    break
                continue
            if self._accepts(entry[3]):
                now = (-score, *entry[1:4])
                if exact == version:
                    break
        return now


def _below(run: Run, context: int, least: float) -> Iterator[Entry]:
    """Entries of shorter contexts, the longest first, and of equal ones in their order."""
    below = sorted_run.last_below(run, (context,))
    while below is not None and below[0] >= least:
        for entry in sorted_run.upwards(run, (below[0],)):
            if entry[0] != below[0]:
                break
            yield entry
        below = sorted_run.last_below(run, (below[0],))


def _rank(found: _Found) -> tuple[float, float, str]:
    return found[:3]

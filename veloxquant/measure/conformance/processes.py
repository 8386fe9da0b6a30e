"""The suite in several processes: pairs of a variant and an architecture, each taken by whichever is free.

Each process makes its own tiny models and measures the engine's own noise itself; a pair is never divided.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from veloxquant.errors import MethodRefused
from veloxquant.measure.conformance.models import architecture
from veloxquant.measure.conformance.subject import Subject
from veloxquant.measure.conformance.suite import check
from veloxquant.methods import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from veloxquant.measure.conformance.outcome import Outcome
    from veloxquant.methods.method import Method, Variant


def check_in(jobs: int, pairs: Sequence[tuple[Method, Variant, str]]) -> Iterator[Outcome]:
    """Outcomes of (installed method, variant, name of an architecture), in the order of the pairs.

    In so many processes, but no more than there are pairs or processor cores. Raises MethodRefused when one ends in
    the middle of a check.
    """
    jobs = min(jobs, len(pairs), os.cpu_count() or 1)
    named = [(method.name, variant, where) for method, variant, where in pairs]
    # spawned: a process that has used mlx has threads, and must not fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_alone) as pool:
        try:
            for outcomes in pool.map(_checked, named):
                yield from outcomes
        except BrokenProcessPool as error:
            raise MethodRefused(
                "a process ended in the middle of a check: a cache brought it down, or memory ran out",
                hint="run again with fewer jobs, or one method at a time to see which it was",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _alone() -> None:
    """What libraries print must not mix with the data of the first process; an interrupt ends this one at once."""
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _checked(pair: tuple[str, Variant, str]) -> list[Outcome]:
    name, variant, where = pair
    return list(check(Subject(_installed().method(name), variant, architecture(where))))


@functools.cache
def _installed() -> registry.Loaded:
    return registry.load()

"""The suite in several processes says what it says in one, and a process that is brought down is told."""

from __future__ import annotations

import os
from typing import Any

import matrix
import pytest

from veloxquant.errors import MethodRefused
from veloxquant.measure import conformance


def test_outcomes_are_those_of_one_process_in_the_order_of_the_pairs() -> None:
    """Latent attention, where every variant is refused: nothing is computed, and reasons differ."""
    methods = [matrix.loaded().method(name) for name in ("kivi", "affine", "streaming")]
    pairs = [(method, method.variants()[0], "deepseek_v3") for method in methods]
    found = list(conformance.check_in(2, pairs))
    where = conformance.architecture("deepseek_v3")
    assert found == [one for pair in pairs for one in conformance.check(conformance.Subject(*pair[:2], where))]
    assert len(found) == 3 * len(conformance.CHECKS)


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def test_a_process_that_ends_in_a_check_is_told() -> None:
    """A cache may end the interpreter; nothing waits for its answer."""
    deadly: Any = Deadly()
    with pytest.raises(MethodRefused, match="ended in the middle of a check"):
        list(conformance.check_in(1, [(matrix.loaded().method("affine"), deadly, "llama")]))

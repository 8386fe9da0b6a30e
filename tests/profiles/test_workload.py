"""What no workload can be is refused by field, whatever was given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from veloxquant.errors import InvalidParams
from veloxquant.profiles import WorkloadProfile


@pytest.mark.parametrize("value", [0, -1, 2**27 + 1, pytest.param(10**5000, id="unprintable"), 1.5, True, "4096", None])
def test_a_length_is_a_whole_number_within_its_bounds(value: Any) -> None:
    """One that Python itself refuses to print included."""
    with pytest.raises(InvalidParams) as caught:
        WorkloadProfile(context_length=value)
    assert caught.value.field == "context_length"
    assert "tokens" in caught.value.hint


@pytest.mark.parametrize("field", ["max_latency_ms", "max_kl"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 10**400, True, "0.1"])
def test_a_ceiling_is_finite_and_above_zero(field: str, value: Any) -> None:
    """10**400 is finite and still no float."""
    with pytest.raises(InvalidParams) as caught:
        WorkloadProfile(**{field: value})
    assert caught.value.field == field


def test_a_refused_value_is_quoted_shortly() -> None:
    """A message stays one short line however long the value is."""
    with pytest.raises(InvalidParams) as caught:
        WorkloadProfile(objective="x" * 10_000)
    assert len(caught.value.message) < 200


def test_sequences_and_tokens() -> None:
    """3 requests of 2 sequences are 6; 100 tokens and 28 more are 128."""
    workload = WorkloadProfile(context_length=100, generation_length=28, batch_size=2, num_concurrent_requests=3)
    assert (workload.sequences, workload.tokens) == (6, 128)

"""A long prompt in calls of one token, where float noise has most chances to flip a level that is passed on."""

from __future__ import annotations

import matrix
import pytest

from veloxquant.measure import conformance
from veloxquant.measure.conformance import selection

EFFORT = conformance.Effort(lengths=(600,), chunks=(1,), single_tokens=600, batches=(), generated=0)


@pytest.mark.parametrize("name", ["rotated", "adaptive"])
def test_600_calls_are_one(name: str) -> None:
    """Windows and full layers: with 8 bits of recent tokens a few levels flip, and layers above pass that on."""
    method = matrix.loaded().method(name)
    subject = conformance.Subject(method, selection.small(method), conformance.architecture("gemma3_text"), EFFORT)
    (outcome,) = conformance.check(subject, ["chunks"])
    assert outcome.status == "passed", outcome.sentence

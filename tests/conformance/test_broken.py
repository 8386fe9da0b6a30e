"""The suite itself: whoever keeps every promise passes, and each broken cache fails the check meant for it."""

from __future__ import annotations

import pytest
from broken_caches import BROKEN, Healthy

from veloxquant.measure import conformance
from veloxquant.measure.conformance.models import architecture


def _subject(method: object, name: str = "llama") -> conformance.Subject:
    return conformance.Subject(method, method.variants()[0], architecture(name), conformance.SHORT)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_broken_cache_is_caught_by_the_check_meant_for_it(wrong: str) -> None:
    """It fails, and says what was expected and what was seen."""
    method, name = BROKEN[wrong]
    (outcome,) = conformance.check(_subject(method), [name])
    assert outcome.status == "failed", outcome
    assert outcome.expected
    assert outcome.seen


def test_a_cache_that_keeps_its_promises_passes_every_check() -> None:
    """Nothing is left out on plain attention."""
    found = {outcome.check: outcome for outcome in conformance.check(_subject(Healthy()))}
    assert list(found) == list(conformance.CHECKS)
    assert [one.sentence for one in found.values() if one.status != "passed"] == []


def test_latent_attention_is_refused_layer_by_layer() -> None:
    """Each layer's reason is told; only what needs no layer is checked."""
    found = {outcome.check: outcome for outcome in conformance.check(_subject(Healthy(), "deepseek_v3"))}
    statuses = {name: outcome.status for name, outcome in found.items()}
    assert statuses == {name: "passed" if name in ("surface", "refusal") else "refused" for name in conformance.CHECKS}
    assert all(f"layer {index}: " in found["bytes"].reason for index in (0, 1))

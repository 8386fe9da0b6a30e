"""Every installed method keeps every promise on tiny models of real architectures, or refuses with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matrix
import msgspec
import pytest

from veloxquant.measure import conformance

if TYPE_CHECKING:
    from collections.abc import Callable

CELLS = matrix.cells()


@pytest.mark.parametrize("check", conformance.CHECKS)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_the_promise_is_kept(
    cell: tuple[str, str, str], check: str, record_property: Callable[[str, object], None]
) -> None:
    """Passed, or refused or not applicable with a sentence."""
    (outcome,) = conformance.check(matrix.subject(*cell), [check])
    record_property("conformance", msgspec.to_builtins(outcome))
    assert outcome.status != "failed", outcome.sentence
    assert outcome.status == "passed" or outcome.reason


@pytest.mark.parametrize("architecture", [name for name, one in conformance.architectures().items() if one.takes])
def test_each_architecture_is_packed_by_some_method(architecture: str) -> None:
    """A plain affine cache of 4 bits takes exactly the layers that the table says can be taken."""
    method = matrix.loaded().method("affine")
    variant = next(one for one in method.variants() if one.label == "affine4-g32")
    found = conformance.Subject(method, variant, conformance.architecture(architecture), conformance.SHORT)
    assert found.probe.packed == conformance.architecture(architecture).takes
    assert {layer.index for layer in found.probe.kept} == set(range(len(found.layers))) - set(found.probe.packed)


def test_latent_attention_is_refused_by_every_variant() -> None:
    """Whatever the method: each layer keeps the engine's cache, and says why."""
    for method in (one for one in matrix.loaded().methods if one.name != "fp16"):
        for variant in method.variants():
            found = conformance.Subject(method, variant, conformance.architecture("deepseek_v3"), conformance.SHORT)
            assert found.probe.packed == ()
            assert {layer.reason for layer in found.probe.kept} <= {"latent", "width", "engine_error"}
            assert all(f"layer {layer.index}: " in str(found.refusal) for layer in found.probe.kept)

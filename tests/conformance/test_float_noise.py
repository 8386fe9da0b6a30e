"""Float noise is measured for exactly what is compared, and what it does now and then is not taken for a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matrix
import mlx.core as mx
import pytest
from broken_caches import Healthy
from mlx_lm.models.cache import KVCache

from veloxquant.measure import conformance
from veloxquant.measure.conformance import batches, models, selection
from veloxquant.measure.conformance.comparing import farthest
from veloxquant.measure.conformance.generation import Made, noise_shown

if TYPE_CHECKING:
    from collections.abc import Sequence


def effort(length: int, **given: Any) -> conformance.Effort:
    """One length of prompts, and nothing else unless given."""
    return conformance.Effort(
        **{"lengths": (length,), "chunks": (), "single_tokens": length, "batches": (), "generated": 0, **given}
    )


BATCH_OF_EIGHT = effort(600, batches=(8,), generated=6)
CALLS_OF_ONE = effort(150, chunks=(1,), single_tokens=150)


@pytest.mark.parametrize(
    ("label", "architecture", "check", "tried"),
    [
        # Changes nothing at this length: all that is seen is noise, which a row of 30 tokens shows more of than 150.
        ("streaming-1024", "gemma4_text", "batch", BATCH_OF_EIGHT),
        # One code of 5,504 words flips, in a token that the 20th generated one attends to.
        ("affine8-g32", "gemma3_text", "batch", effort(150, batches=(2,), generated=22)),
        # All keys have one norm but for noise.
        ("knorm-budget.96-recent.32-stride.16", "gemma3_text", "chunks", CALLS_OF_ONE),
    ],
)
def test_noise_is_no_fault(label: str, architecture: str, check: str, tried: conformance.Effort) -> None:
    """Real methods on models whose noise once was taken for theirs."""
    ((method, variant),) = selection.chosen(matrix.loaded(), None, label)
    subject = conformance.Subject(method, variant, conformance.architecture(architecture), tried)
    (outcome,) = conformance.check(subject, [check])
    assert outcome.status == "passed", outcome.sentence


def shown(subject: conformance.Subject, monkeypatch: pytest.MonkeyPatch, check: str) -> Sequence[float]:
    """What a check says that the engine's own caches show, each time that it compares."""
    found: list[float] = []

    def unlike(_: Any, __: Any, ___: Any, noise: float = 0.0) -> None:
        found.append(noise)

    monkeypatch.setattr(conformance.Subject, "unlike", unlike)
    assert [one.status for one in conformance.check(subject, [check])] == ["passed"]
    return found


def test_pieces_are_those_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens, cut alike: in chunks, and one by one after the prompt."""
    method = Healthy()
    tried = effort(50, chunks=(1, 7), single_tokens=20)
    subject = conformance.Subject(method, method.variants()[0], conformance.architecture("llama"), tried)
    own = [
        farthest(models.own_logits("llama", n, size), models.own_logits("llama", n)) for n, size in ((20, 1), (50, 7))
    ]
    assert list(shown(subject, monkeypatch, "chunks")) == own
    caches = models.Own("llama").caches()
    models.logits(subject.model, caches, subject.text())
    one_by_one = models.logits(subject.model, caches, subject.more, 1)
    caches = models.Own("llama").caches()
    models.logits(subject.model, caches, subject.text())
    assert shown(subject, monkeypatch, "steps") == [
        farthest(one_by_one, models.logits(subject.model, caches, subject.more))
    ]


def test_batches_are_measured_as_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the engine's own batch against its own single runs, of as many tokens; the largest goes for all rows."""
    method = Healthy()
    tried = effort(60, batches=(2,), generated=3)
    subject = conformance.Subject(method, method.variants()[0], conformance.architecture("llama"), tried)
    rows: list[tuple[int, float]] = []

    def recorded(seen: Made, expected: Made) -> float:
        assert {type(cache) for one in (seen, expected) for cache in one.caches} == {KVCache}
        rows.append((len(expected.tokens), noise_shown(seen, expected)))
        return rows[-1][1]

    monkeypatch.setattr(batches, "noise_shown", recorded)
    assert shown(subject, monkeypatch, "batch") == [max(most for _, most in rows)] * (3 + 2)
    assert [tokens for tokens, _ in rows] == [3, 2]


def test_generations_are_compared_up_to_where_they_part() -> None:
    """The token that differs counts, what follows does not."""

    def made(*rows: tuple[int, float]) -> Made:
        return Made([(token, mx.array([value, 0.0])) for token, value in rows], [])

    assert noise_shown(made((1, 1.0), (2, 2.0)), made((1, 1.5), (2, 2.25))) == 0.5
    assert noise_shown(made((1, 1.0), (0, 2.0), (1, 9.0)), made((1, 1.0), (1, 2.25), (1, 0.0))) == 0.25

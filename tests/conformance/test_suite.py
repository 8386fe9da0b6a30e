"""What surrounds the checks: which variants are tried, what the table says, the other process, the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matrix
import mlx.core as mx
import pytest
from broken_caches import Healthy
from mlx_lm.models.cache import KVCache, save_prompt_cache

from veloxquant.errors import InvalidParams, MethodNotFound
from veloxquant.measure import conformance
from veloxquant.measure.conformance import another_process, models, report, selection
from veloxquant.measure.conformance.comparing import FLIPS, Flips, allowed, flipped, rms
from veloxquant.measure.conformance.subject import Run

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Status

DOCUMENT = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")


def outcome(status: Status, check: str = "bytes", label: str = "a", **told: str) -> conformance.Outcome:
    """Of a method m on llama."""
    return conformance.Outcome(method="m", label=label, architecture="llama", check=check, status=status, **told)


@pytest.fixture
def subject() -> conformance.Subject:
    """A plain packed method on plain attention."""
    method = Healthy()
    return conformance.Subject(method, method.variants()[0], conformance.architecture("llama"), conformance.SHORT)


def test_logits_are_equal_but_for_noise_and_a_few_flipped_codes(subject: conformance.Subject) -> None:
    """2 % of what the method moves them by passes, 3 % does not, nor does NaN; one entry of noise passes."""
    count = subject.prompt_tokens
    expected = subject.in_one_call(count)
    moved = mx.sign(mx.random.normal(expected.logits.shape, key=mx.random.key(1))) * subject.moved(count)
    assert rms(moved) == pytest.approx(subject.moved(count), rel=1e-3)
    assert FLIPS == 0.02
    assert subject.unlike(expected, expected) is None
    assert subject.unlike(Run(expected.logits + 0.0197 * moved), expected) is None
    assert "differ by" in str(subject.unlike(Run(expected.logits + 0.0203 * moved), expected))
    assert "nan" in str(subject.unlike(Run(expected.logits * float("nan")), expected))


def test_flipped_codes_are_counted_and_allow_for_more(subject: conformance.Subject) -> None:
    """4-bit words of 150 tokens: 2 heads x 8 for K, and for V, beside the slack. Many flips are no accident."""
    one, other = subject.filled(), subject.filled()
    pairs = list(zip(one, other, strict=True))
    of, each = 2 * 2 * 8 * 150, 2 * 8 * 150
    assert flipped(pairs) == (0, 0, 0.0)
    other[1].keys[0][0, 0, 3, 0] += 1
    assert flipped(pairs) == (1, of, 1 / each)
    other[0].values[0][0, 1, :5] += 1
    assert flipped(pairs) == (40, of, 40 / each)
    expected = Run(subject.in_one_call(150).logits, one)
    more = 0.1 * mx.sign(mx.random.normal((150, 64), key=mx.random.key(1))) * subject.moved(150)
    assert "40 of 4800 words" in str(subject.unlike(Run(expected.logits + more, other), expected))
    other[0] = one[0]
    for at, most in enumerate((2, 2, 2, 2, 0.91)):  # 2 sqrt(5 / 2400) is 0.0913
        assert subject.unlike(Run(expected.logits + 0.99 * most * more, other), expected) is None
        assert subject.unlike(Run(expected.logits + 1.02 * most * more, other), expected) is not None
        other[1].keys[0][0, 0, 9 + at, 0] += 1


@pytest.mark.parametrize(
    ("flips", "share"),
    [
        (Flips(0, 0, 0.0), 0.02),
        (Flips(1, 5568, 0.0004), 0.2),
        (Flips(4, 100, 0.04), 0.2),
        (Flips(5, 100, 0.05), 0.02),
        (Flips(5, 10000, 0.0025), 0.1),
        (Flips(5, 10000, 0.00001), 0.02),
        (Flips(50, 10000, 0.01), 0.2),
        (Flips(51, 10000, 0.01), 0.02),
    ],
)
def test_what_flips_allow_for(flips: Flips, share: float) -> None:
    """20 % for 4 words, which may be any; 2 sqrt(share of the worst array), from 2 to 20 %, for one in 200."""
    assert allowed(flips) == pytest.approx(share)


def test_float_noise_is_far_below_what_the_method_does(subject: conformance.Subject) -> None:
    """So that the tolerance for noise hides no flipped group."""
    count = subject.prompt_tokens
    cut = [models.own_logits("llama", count, chunk) - models.own_logits("llama", count) for chunk in (1, 7, 64)]
    for shown in (0.0, *(float(abs(one).max()) for one in cut)):
        assert subject.noise(count, shown) < 0.01 * subject.moved(count)


def test_the_models_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Another process computes the same logits from a saved list of empty caches."""
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, [KVCache(), KVCache()])
    answer = another_process.load(file, "llama", models.text()[:9], [])
    assert answer.error is None
    assert mx.array_equal(answer.logits, models.own_logits("llama", 9))


def test_a_process_that_dies_is_told_and_the_next_prompt_gets_another(tmp_path: Path) -> None:
    """A cache may end the interpreter that loads it."""
    nowhere = str(tmp_path / "none.safetensors")
    assert "none.safetensors" in str(another_process.load(nowhere, "llama", [1], []).error)
    assert another_process._process is not None
    another_process._process.kill()
    another_process._process.wait()
    assert "ended with code -9" in str(another_process.load(nowhere, "llama", [1], []).error)
    assert "none.safetensors" in str(another_process.load(nowhere, "llama", [1], []).error)


def test_the_table_counts_by_variant_and_architecture() -> None:
    """Passed, refused and failed; a variant that no layer takes is one word."""
    found = [
        outcome("passed"),
        outcome("failed", "offset", expected="1", seen="2"),
        outcome("not_applicable", "trim", reason="a window"),
        outcome("refused", "layers", label="b", reason="too wide"),
        outcome("refused", "bytes", label="b", reason="too wide"),
        outcome("passed", "refusal", label="b"),
    ]
    assert report.rows(found) == [["METHOD", "VARIANT", "llama"], ["m", "a", "1/0/1"], ["m", "b", "refused"]]
    assert report.failures(found) == ["a on llama, offset: expected 1; seen: 2"]
    assert report.reasons(found) == ["llama, not applicable (a): a window", "llama, refused (b): too wide"]


def test_reasons_alike_are_told_once() -> None:
    """With three labels and how many more."""
    found = [outcome("refused", label=label, reason="too wide") for label in "abcde"]
    assert report.reasons(found) == ["llama, refused (a, b, c and 2 more): too wide"]


def test_small_variants_have_small_parameters_and_labels_of_their_own() -> None:
    """Of every installed method; the second is the cheapest planned one unless the method drops tokens."""
    for method in selection.packing(matrix.loaded()):
        small, second = selection.small(method), selection.second(method)
        declared = {parameter.name for parameter in method.parameters()}
        for name in declared & selection.SMALL.keys():
            assert small.params.get(name, selection.SMALL[name]) == selection.SMALL[name]
        assert method.drops_tokens or second in method.variants()


def test_what_is_not_in_the_tables_is_refused() -> None:
    """Architectures, methods and labels."""
    with pytest.raises(InvalidParams, match="no tiny model of the architecture 'nope'"):
        conformance.architecture("nope")
    for name, label in (("nope", None), (None, "nope"), ("affine", "turboquant-mse2")):
        with pytest.raises(MethodNotFound):
            selection.chosen(matrix.loaded(), name, label)


def test_an_exception_in_a_check_is_a_failure_with_its_promise(
    subject: conformance.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache under test may raise anything."""

    def raising(*_: Any) -> Any:
        raise KeyError("offset")

    monkeypatch.setattr(conformance.Subject, "logits", raising)
    (found,) = conformance.check(subject, ["saved"])
    assert found.status == "failed"
    assert found.seen == "KeyError: 'offset'"


def test_every_check_and_every_model_is_documented() -> None:
    """docs/conformance.md has a row for each, with the layers that can be packed."""
    for name in conformance.CHECKS:
        assert f"\n| `{name}` | " in DOCUMENT
    for name, one in conformance.architectures().items():
        takes = ", ".join(map(str, one.takes)) or "none"
        (row,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith(f"| {takes} |")

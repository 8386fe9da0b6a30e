"""`veloxquantctl methods check`: a table for people, outcomes for programs, and an exit code that says how it went."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.measure import conformance
from veloxquant.measure.conformance import models, suite
from veloxquant.measure.conformance.outcome import PASSED, failed, not_applicable, refused
from veloxquant.methods import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WANTED = ("methods", "check", "affine", "--variant", "affine4-g32")


@pytest.fixture(autouse=True)
def three_checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In the place of the real ones, which have tests of their own."""
    checks = {"one": lambda _: PASSED, "two": lambda _: refused("it is too wide"), "three": lambda _: PASSED}
    monkeypatch.setattr(suite, "CHECKS", checks)
    monkeypatch.setattr(conformance, "CHECKS", checks)
    monkeypatch.setattr(suite.check, "__defaults__", (tuple(checks),))
    return checks


def test_a_table_counts_and_reasons_follow(ctl: Callable[..., Any]) -> None:
    """Two passed, one refused, none failed; the refusal's sentence; exit code 0."""
    done = ctl(*WANTED, "--architecture", "llama")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["METHOD", "VARIANT", "llama"]
    assert lines[1].split() == ["affine", "affine4-g32", "2/1/0"]
    assert "llama, refused (affine4-g32): it is too wide" in done.out


def test_a_failure_is_told_and_ends_with_1(ctl: Callable[..., Any], three_checks: dict[str, Any]) -> None:
    """What was expected and seen."""
    three_checks["three"] = lambda _: failed("12 bytes", "13")
    done = ctl(*WANTED, "--architecture", "llama")
    assert done.code == 1
    assert "affine4-g32 on llama, three: expected 12 bytes; seen: 13" in done.out


def test_json_is_every_outcome(ctl: Callable[..., Any], three_checks: dict[str, Any]) -> None:
    """One object on stdout, one outcome a check and architecture, in the order that they ran."""
    three_checks["three"] = lambda _: not_applicable("nothing is kept")
    done = ctl(*WANTED, "--json")
    assert done.code == 0
    answer = json.loads(done.out)
    assert answer["schema"] == "veloxquant.conformance/1"
    assert answer["failed"] == 0
    ran = [(one["architecture"], one["check"]) for one in answer["outcomes"] if one["status"] == "not_applicable"]
    latent = [name for name, one in models.architectures().items() if not one.takes]
    assert ran == [(name, "three") for name in models.architectures() if name not in latent]


def test_without_a_name_every_planned_variant_is_checked(ctl: Callable[..., Any]) -> None:
    """All but those of the engine itself; and for each method small ones, which no plan chooses."""
    done = ctl("methods", "check", "--architecture", "llama", "--json")
    planned = [variant.label for method, variant in registry.load().variants if method.name != "fp16"]
    labels = [one["label"] for one in json.loads(done.out)["outcomes"] if one["check"] == "one"]
    assert [label for label in labels if label in planned] == planned
    assert len(labels) == len(set(labels)) >= len(planned)


def test_several_processes_share_the_pairs(ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variant by variant, architecture by architecture; what they found is told as if it had been found here."""
    asked: list[tuple[int, list[tuple[str, str]]]] = []

    def check_in(jobs: int, pairs: Sequence[tuple[Any, Any, str]]) -> Iterator[conformance.Outcome]:
        asked.append((jobs, [(variant.label, where) for _, variant, where in pairs]))
        for method, variant, where in pairs:
            yield conformance.Outcome(
                method=method.name, label=variant.label, architecture=where, check="one", status="passed"
            )

    monkeypatch.setattr(conformance, "check_in", check_in)
    done = ctl(*WANTED, "--jobs", "3", "--json")
    assert asked == [(3, [("affine4-g32", name) for name in models.architectures()])]
    assert [one["architecture"] for one in json.loads(done.out)["outcomes"]] == list(models.architectures())
    assert done.code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("methods", "check", "nope"), "no method 'nope' is ready"),
        (("methods", "check", "affine", "--variant", "kivi-k2v2"), "no variant 'kivi-k2v2' is ready"),
        (("methods", "check", "affine", "--architecture", "nope"), "no tiny model of the architecture 'nope'"),
        (("methods", "check", "fp16"), "there is nothing to check"),
        (("methods", "check", "affine", "turboquant"), "'turboquant' is no known"),
        (("methods", "check", "affine", "--jobs", "0"), "no process is to check"),
        (("methods", "check", "affine", "--jobs", "many"), "--jobs"),
        (("methods", "list", "--variant", "affine4-g32"), "--variant is for check"),
        (("methods", "list", "--jobs", "2"), "--jobs is for check"),
        (("methods", "show", "affine", "--architecture", "llama"), "--architecture is for check"),
    ],
)
def test_what_is_not_there_is_refused(ctl: Callable[..., Any], words: tuple[str, ...], told: str) -> None:
    """With exit code 2 and nothing on stdout."""
    done = ctl(*words)
    assert done.code == 2
    assert done.out == ""
    assert told in done.err

"""What a check found: one frozen value for each check of a variant on an architecture."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Status = Literal["passed", "failed", "refused", "not_applicable"]


class Verdict(NamedTuple):
    """A check's answer, before it is known under which name it was asked."""

    status: Status
    reason: str = ""
    """Of a refusal, or why the check does not apply."""
    expected: str = ""
    seen: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one variant on one architecture. `failed` says what was expected and seen, the others why."""

    method: str
    label: str
    architecture: str
    check: str
    status: Status
    reason: str = ""
    expected: str = ""
    seen: str = ""

    @property
    def sentence(self) -> str:
        """Reason, or what was expected and seen, on one line."""
        return f"expected {self.expected}; seen: {self.seen}" if self.status == "failed" else self.reason


PASSED = Verdict("passed")


def failed(expected: str, seen: str) -> Verdict:
    """A promise that is not kept."""
    return Verdict("failed", expected=expected, seen=seen)


def refused(reason: str) -> Verdict:
    """A typed refusal that a caller can see before it is too late."""
    return Verdict("refused", reason)


def not_applicable(reason: str) -> Verdict:
    """The promise is not made here."""
    return Verdict("not_applicable", reason)


def unless(problems: list[tuple[str, str]]) -> Verdict:
    """Passed, or failed with the first of (expected, seen)."""
    return failed(*problems[0]) if problems else PASSED

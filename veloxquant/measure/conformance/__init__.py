"""The conformance suite: what every cache must do, run for a method's variant on tiny models of real architectures.

    from veloxquant.measure import conformance
    subject = conformance.Subject(method, variant, conformance.architecture("llama"))
    for outcome in conformance.check(subject): ...

docs/conformance.md lists the checks.
"""

from veloxquant.measure.conformance.models import Architecture, architecture, architectures
from veloxquant.measure.conformance.outcome import Outcome
from veloxquant.measure.conformance.processes import check_in
from veloxquant.measure.conformance.subject import FULL, PLAIN, SHORT, Effort, Subject
from veloxquant.measure.conformance.suite import CHECKS, check

__all__ = [
    "CHECKS",
    "FULL",
    "PLAIN",
    "SHORT",
    "Architecture",
    "Effort",
    "Outcome",
    "Subject",
    "architecture",
    "architectures",
    "check",
    "check_in",
]

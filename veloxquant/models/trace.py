"""Tracing a model in a worker process: what the engine says of it, or what became of the worker."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from veloxquant import environment
from veloxquant.models import bounded
from veloxquant.models.exchange import Failed, Probed, Traced, TraceRequest, decode_answers
from veloxquant.profiles.model import CacheLayer, KeptLayer, Probe

if TYPE_CHECKING:
    from veloxquant.models.bounded import Outcome
    from veloxquant.profiles.model import ModelProfile

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from veloxquant.models.trace_worker.__main__ import main; main()"
)
"""The worker sees the packages this process sees, installed or not."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_CPU_SLACK_S = 10
_FENCES = {
    "namespace": "a network namespace of its own",
    "sandbox": "the system's sandbox",
    "audit": "audit hooks alone, since the system grants no namespace",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trace:
    """One of profile, failed and died is set; a worker that died after its profile leaves profile set."""

    profile: ModelProfile | None = None
    failed: Failed | None = None
    network: str = ""
    """What kept the worker from the network, "" when it never said."""
    died: str = ""
    """Why there is no whole answer, as a clause: "was killed by SIGSEGV"."""


def trace(request: TraceRequest, *, timeout_s: float) -> Trace:
    """Run the worker, and run it again for the probes left over when one of them ends it, all within timeout_s.

    A probe that ended the worker, and those there was no time for, are refused with that reason.
    """
    deadline = time.monotonic() + timeout_s
    answer = _ask(request, timeout_s)
    if answer.profile is None:
        return answer
    profile, died, probes = answer.profile, "", list(answer.profile.probes)
    while len(probes) < len(request.probes):
        died = answer.died or "gave no answer"
        probes.append(_refused(request, len(probes), profile.layers, f"the trace {died} during this probe"))
        left = request.probes[len(probes) :]
        if not left:
            break
        seconds = deadline - time.monotonic()
        if seconds < 1:
            why = f"not tried: no time was left after {request.probes[len(probes) - 1].label}"
            probes += [_refused(request, at, profile.layers, why) for at in range(len(probes), len(request.probes))]
            break
        answer = _ask(msgspec.structs.replace(request, probes=left), seconds)
        probes += answer.profile.probes if answer.profile is not None else ()
    return Trace(profile=msgspec.structs.replace(profile, probes=tuple(probes)), network=answer.network, died=died)


def _ask(request: TraceRequest, timeout_s: float) -> Trace:
    limited = msgspec.structs.replace(request, cpu_limit_s=int(timeout_s) + _CPU_SLACK_S)
    outcome = bounded.run(
        (sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)),
        request=msgspec.json.encode(limited) + b"\n",
        timeout_s=timeout_s,
        memory_limit_bytes=request.memory_limit_bytes,
        env={**environment.known(), **_OFFLINE},
    )
    return replace(_answer(outcome), died=_clause(outcome))


def _answer(outcome: Outcome) -> Trace:
    answers = decode_answers(outcome.answer)
    first = answers[0] if answers else None
    if isinstance(first, Failed):
        return Trace(failed=first)
    if not isinstance(first, Traced):
        return Trace()
    probes = tuple(answer.probe for answer in answers[1:] if isinstance(answer, Probed))
    _log.info("a model was traced without network by %s", _FENCES.get(first.network, "nothing that it named"))
    return Trace(profile=msgspec.structs.replace(first.profile, probes=probes), network=first.network)


def _clause(outcome: Outcome) -> str:
    if not outcome.ended:
        return ""
    last_line = outcome.errors.splitlines()[-1][:300] if outcome.errors else ""
    return f"{outcome.ended} ({last_line})" if last_line else outcome.ended


def _refused(request: TraceRequest, at: int, layers: tuple[CacheLayer, ...], why: str) -> Probe:
    asked = request.probes[at]
    kept = tuple(KeptLayer(index=layer.index, reason="engine_error", detail=why) for layer in layers)
    return Probe(method=asked.method, label=asked.label, kept=kept, refused=why)

"""Trying out plugins in a process of their own, before any of their code runs in ours.

A thread that hangs cannot be ended and `os._exit` cannot be caught, so each plugin that is not ours is first loaded
in a forked child of a short-lived helper process. One helper serves all plugins: it pays for starting Python and
importing this package once, and each plugin then costs a fork and its own import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from veloxquant import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods.plugin import Plugin

_BOOT = (
    "import json,sys; sys.path[:]=json.loads(sys.argv[1]); from veloxquant.methods.probe_process import main; main()"
)
_START_S = 15.0
"""For the helper to start on a busy machine; its answers are bounded by the limits below."""
_UNEXAMINED = "it could not be tried out before loading"


@dataclass(frozen=True)
class Limits:
    """Seconds a plugin may take for each stage, and bytes it may write to its standard streams."""

    import_s: float
    hook_s: float
    check_s: float
    output_bytes: int = 64 * 1024


@dataclass(frozen=True)
class Verdict:
    """Whether a plugin may be loaded, and if not, why. `took_s` is its import, hook and checks together."""

    ok: bool
    reason: str = ""
    took_s: float = 0.0


def examine(plugins: Sequence[Plugin], limits: Limits) -> tuple[Verdict, ...]:
    """A verdict for each plugin, in order. Never raises; no code of theirs runs in this process."""
    if not plugins:
        return ()
    job = json.dumps({"plugins": [asdict(plugin) for plugin in plugins], "limits": asdict(limits)})
    each = limits.import_s + limits.hook_s + limits.check_s + 1.0
    done = None
    try:
        done = subprocess.run(  # noqa: S603 -- our own interpreter, our own module
            [sys.executable, "-c", _BOOT, json.dumps([str(entry) for entry in sys.path])],
            input=job.encode(),
            capture_output=True,
            timeout=_START_S + each * len(plugins),
            check=False,
            env={name: value for name, value in environment.known().items() if name != "VELOXQUANT_TRACE_HOOKS"},
        )
        verdicts = [Verdict(**answer) for answer in json.loads(done.stdout)]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        last_words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done is not None else ""
        reason = f"{_UNEXAMINED}: {last_words or f'{type(error).__name__}: {error}'}"
        return (Verdict(ok=False, reason=reason),) * len(plugins)
    if len(verdicts) != len(plugins):
        return (Verdict(ok=False, reason=_UNEXAMINED),) * len(plugins)
    return tuple(verdicts)

"""Verdicts of earlier probes, kept on disk, so that a plugin is tried out again only when it changed.

A good verdict holds while the plugin's own files stay as they are. A bad one holds for ten minutes at most and only
while nothing was installed or removed, since its cause may lie outside the plugin (a missing package, a busy machine).
Nothing here raises: without a disk every load simply probes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import ownership
from veloxquant.methods.plugin_files import digest, site
from veloxquant.methods.probe import Verdict

if TYPE_CHECKING:
    from veloxquant.methods.plugin import Plugin

BAD_FOR_S = 600.0


def recall(folder: Path, plugin: Plugin, stamped: str | None) -> Verdict | None:
    """The verdict of an earlier probe, None where there is none that still holds."""
    if stamped is None:
        return None
    path = _path(folder, plugin)
    try:
        facts = path.stat()
        if facts.st_uid != os.geteuid() or ownership.others(facts) is not None:
            return None  # somebody else's word on what may run here
        kept = json.loads(path.read_text())
        age = time.time() - facts.st_mtime
        verdict = Verdict(ok=kept["ok"], reason=kept["reason"], took_s=kept["took_s"])
        if kept["stamp"] != stamped or not isinstance(verdict.ok, bool) or not isinstance(verdict.reason, str):
            return None
        fresh = 0 <= age <= BAD_FOR_S and kept["site"] == site()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if verdict.ok or fresh else None


def remember(folder: Path, plugin: Plugin, stamped: str | None, verdict: Verdict) -> None:
    """Keep a verdict; a disk that cannot be written costs the next load a probe and nothing else."""
    if stamped is None:
        return
    kept = {"stamp": stamped, "site": site(), "ok": verdict.ok, "reason": verdict.reason, "took_s": verdict.took_s}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder)
    except OSError:
        return
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(kept, file)
        temporary.replace(_path(folder, plugin))
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _path(folder: Path, plugin: Plugin) -> Path:
    return folder / f"{digest([plugin.distribution, plugin.name, plugin.value])}.json"

"""Doctor's checks on what was set: variables nobody reads, and where the log goes."""

from __future__ import annotations

import os
import stat
import tempfile
from typing import TYPE_CHECKING

from veloxquant import ownership
from veloxquant.config import PREFIX, log_file_of, variables
from veloxquant.ctl import log_lines
from veloxquant.ctl.finding import Finding, away, existing, failed, note, ok, way_to_write
from veloxquant.units import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.config import Config

_OURS = frozenset({"VELOXQUANT_TRACEBACK", "VELOXQUANT_NO_SKIP", "VELOXQUANT_SMOLLM2_WHEEL", "VELOXQUANT_PEER_PYTHON"})
"""Read by veloxquantctl, the tests and the benches, and no settings."""
_LOG_BYTES = 20 * 10**6
"""The daemon's own files have 15 MiB at most; more was put there by something else."""


def environment(_config: Config) -> Finding:
    """Every VELOXQUANT_ variable means something: a misspelt one is a setting that does not hold."""
    import difflib

    known = variables() | _OURS
    strange = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if not strange:
        count = sum(name.startswith(PREFIX) for name in os.environ)
        return ok(f"{count} VELOXQUANT_ variables, all of them known" if count else "no VELOXQUANT_ variable is set")
    near = difflib.get_close_matches(strange[0], known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return note(f"nothing reads {', '.join(strange)}", f"{meant}unset {' '.join(strange)}")


def log(config: Config) -> Finding:
    """The daemon's log can be written, is private, and is no larger than it should be."""
    place = log_file_of(config)
    if place is None:
        return ok('the log is turned off: daemon.log_file is ""')
    try:
        facts = place.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return _folder(place)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        return _no_log(place)
    if facts.st_mode & 0o077:
        return note(f"the log {place} is open to others until the daemon starts", f"chmod 600 '{place}'")
    size = sum(one.stat().st_size for one in log_lines.files(place))
    if size > _LOG_BYTES:
        return note(f"{format_size(size)} of logs at {place}", f"remove older ones: rm '{place}'.[0-9]*")
    return _folder(place)


def _no_log(place: Path) -> Finding:
    if place.is_symlink():
        return failed(f"the log {place} is a symbolic link: lines are lost", away(place))
    return failed(  # a folder, a device: nothing to be moved
        f"the log {place} is no plain file of yours: lines are lost",
        'set daemon.log_file to a file of your own, "default", or "" for none',
    )


def _folder(place: Path) -> Finding:
    folder = existing(place.parent)
    facts = folder.stat()
    if folder == place.parent and ownership.others(facts) is not None and not facts.st_mode & stat.S_ISVTX:
        return failed(f"others can write in the log's folder {folder}: lines are lost", f"chmod go-w '{folder}'")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            pass
    except OSError as error:
        return failed(
            f"the log cannot be written: {folder}: {error.strerror or error}",
            way_to_write(folder, "daemon.log_file", error),
        )
    return ok(f"{place} can be written")

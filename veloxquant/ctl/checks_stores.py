"""Doctor's checks on what lies on disk: records, methods, traces, room and time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import local, ownership
from veloxquant.config import log_file_of
from veloxquant.ctl.finding import Finding, away, existing, failed, note, ok, way_to_write
from veloxquant.errors import SocketRefused, StoreError
from veloxquant.units import format_count, format_size

if TYPE_CHECKING:
    from veloxquant.config import Config

_DISK_BYTES = 256 * 2**20
"""A trace takes some 100 KiB, a record 1 KiB; below this everything else on the machine is in trouble, too."""
_SKEW_S = 5.0
_AHEAD_S = 300.0
"""Clocks of two machines differ by minutes where nobody sets them; more than that is wrong."""
_TOLD = 3
_BUILT = 1_767_225_600
"""1 January 2026: a clock before it is wrong, since this program is younger."""


def records_readable(config: Config) -> Finding:
    """The benchmark directory can be read, and says how much of it is not used."""
    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

    directory = local.records_directory(config)
    try:
        database = BenchmarkDatabase(directory)
        held, skipped = len(database.records), len(database.skipped)
        database.close()
    except StoreError as error:
        return failed(error.message, error.hint or "set records.directory to a folder of your own")
    used = f"{format_count(held, 'record')} used"
    if skipped:
        return note(f"{used}, {skipped:,} skipped in {directory}", "veloxquantctl records --skipped")
    return ok(f"{used} in {directory}")


def record_dates(config: Config) -> Finding:
    """No record is from the future: it would count as the newest for as long as that lasts."""
    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

    latest = datetime.fromtimestamp(time.time() + _AHEAD_S, UTC).isoformat()
    database = BenchmarkDatabase(local.records_directory(config))
    ahead = [record for record in database.as_held().values() if record.created_at > latest]
    database.close()
    if not ahead:
        return ok("no record is dated ahead of the clock")
    last = max(ahead, key=lambda record: record.created_at)
    dated = f"{format_count(len(ahead), 'record')} {'is' if len(ahead) == 1 else 'are'} dated"
    return note(
        f"{dated} ahead of the clock, up to {last.created_at} ({last.id})",
        "check this clock, and that of the machine that measured; veloxquantctl records lists the newest first",
    )


def index_readable(config: Config) -> Finding:
    """The index of the records is ours to write, or is made again."""
    from veloxquant.benchmarks import index

    place = local.records_directory(config) / "index.json"
    found = index.read(place)
    if found.problem is not None:
        fix = f"it is made again from the records, {away(place)}"
        return failed(found.problem, fix if os.path.lexists(place) else _way_into(place.parent))
    return ok(f"{place} is readable" if found.content is not None else f"{place} is made from the records when needed")


def records_writable(config: Config) -> Finding:
    """Measurements can be kept."""
    directory = local.records_directory(config)
    return _writable(directory, "measurements cannot be kept", "records.directory")


def calibrations_readable(config: Config) -> Finding:
    """Those beside the records can be read; which are not used, and why."""
    from veloxquant.benchmarks.calibrations import Calibrations

    try:
        store = Calibrations(local.records_directory(config))
    except StoreError as error:
        return failed(error.message, error.hint or "set records.directory to a folder of your own")
    store.look()
    if store.trouble is not None:
        return failed(store.trouble, _way_into(store.folder))
    if store.skipped:
        told = "; ".join(f"{name}: {why}" for name, why in list(store.skipped.items())[:_TOLD])
        return note(f"{len(store.known):,} calibrations used; {told}", f"look into {store.folder}")
    return ok(f"{len(store.known):,} calibrations used in {store.folder}")


def methods(_config: Config) -> Finding:
    """Every installed plugin is ready."""
    from veloxquant.methods import registry

    loaded = registry.load()
    if not loaded.quarantined:
        names = ", ".join(method.name for method in loaded.methods)
        if not names:
            return failed("no method is installed", "pip install veloxquant")
        if loaded.warnings:
            return note("; ".join(loaded.warnings), "update or uninstall the distribution named")
        return ok(f"methods ready: {names}")
    fenced = "; ".join(f"{one.name} ({one.distribution or 'unknown'}): {one.reason}" for one in loaded.quarantined)
    return failed(f"quarantined: {fenced}", "reinstall or uninstall the distribution named, then veloxquantctl reload")


def traces_writable(config: Config) -> Finding:
    """Traced models can be kept; otherwise each is traced again after a restart."""
    folder = local.trace_directory(config)
    exposed = ownership.exposed(folder) if folder.is_dir() else None
    if exposed is not None:
        return failed(f"no kept trace is believed: {folder} {exposed.reason}", exposed.hint)
    return _writable(folder, "traces cannot be kept", "trace.cache_directory")


def disk_space(config: Config) -> Finding:
    """There is room for traces, records and the log, wherever they lie."""
    places = {
        "trace.cache_directory": existing(local.trace_directory(config)),
        "records.directory": existing(local.records_directory(config)),
    }
    with contextlib.suppress(SocketRefused):  # for the check of the path to tell
        if (log := log_file_of(config)) is not None:
            places["daemon.log_file"] = existing(log.parent)
    free = {setting: shutil.disk_usage(place).free for setting, place in places.items()}
    least = min(free, key=lambda setting: free[setting])
    text = f"{format_size(free[least])} free at {places[least]}"
    if free[least] < _DISK_BYTES:
        return failed(text, f"free some disk space, or set {least} to a place on another disk")
    return ok(text)


def clock(_config: Config) -> Finding:
    """The clock is plausible, and agrees with the file system's: ages of records depend on it."""
    now = time.time()
    if now < _BUILT:
        return failed("the clock is before 2026, when this program was made", "set the clock")
    with tempfile.NamedTemporaryFile() as file:
        skew = Path(file.name).stat().st_mtime - now
    if abs(skew) > _SKEW_S:
        return note(f"files are stamped {skew:+.0f} s off the clock", "check the time of the file server")
    return ok("the clock is plausible")


def _way_into(folder: Path) -> str:
    """What keeps its files from being read: a file in its place, others who may write there, or the folder above."""
    place = existing(folder)
    if not place.is_dir():
        return away(place)
    exposed = ownership.exposed(place)
    return way_to_write(place, "records.directory") if exposed is None else exposed.hint


def _writable(folder: Path, otherwise: str, key: str) -> Finding:
    """A file can be made in the folder, or where the folder would be made."""
    place = existing(folder)
    missing = [one for one in (folder, *folder.parents) if one.is_relative_to(place) and one != place]
    for link in (one for one in missing if one.is_symlink()):
        return failed(f"{otherwise}: {link} is a link to {link.readlink()}, where nothing is", away(link))
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-"):
            pass
    except OSError as error:
        return failed(f"{otherwise}: {place}: {error.strerror or error}", way_to_write(place, key, error))
    return ok(f"{folder} is writable" if place == folder else f"{folder} can be made")

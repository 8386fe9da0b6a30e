"""Doctor's checks on what lies on disk: records, methods, traces, room and time."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import local, paths
from veloxquant.ctl.finding import Finding, existing, failed, note, ok
from veloxquant.errors import StoreError
from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.config import Config

_DISK_BYTES = 256 * 2**20
"""A trace takes some 100 KiB, a record 1 KiB; below this everything else on the machine is in trouble, too."""
_SKEW_S = 5.0
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
    if skipped:
        return note(f"{held:,} records used, {skipped:,} skipped in {directory}", "veloxquantctl records --skipped")
    return ok(f"{held:,} records used in {directory}")


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
        return failed(store.trouble, "make the folder readable, or set records.directory")
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
        return ok(f"methods ready: {names}") if names else failed("no method is installed", "pip install veloxquant")
    fenced = "; ".join(f"{one.name} ({one.distribution or 'unknown'}): {one.reason}" for one in loaded.quarantined)
    return failed(f"quarantined: {fenced}", "reinstall or uninstall the distribution named, then veloxquantctl reload")


def traces_writable(config: Config) -> Finding:
    """Traced models can be kept; otherwise each is traced again after a restart."""
    return _writable(local.trace_directory(config), "traces cannot be kept", "trace.cache_directory")


def disk_space(_config: Config) -> Finding:
    """There is room for traces and records."""
    place = existing(paths.cache_dir())
    free = shutil.disk_usage(place).free
    if free < _DISK_BYTES:
        return failed(f"{format_size(free)} free at {place}", "free some disk space, or set trace.cache_directory")
    return ok(f"{format_size(free)} free at {place}")


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


def _writable(folder: Path, otherwise: str, key: str) -> Finding:
    """A file can be made in the folder, or where the folder would be made."""
    place = existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-"):
            pass
    except OSError as error:
        fix = f"chmod u+rwx '{place}', free disk space, or set {key}"
        return failed(f"{otherwise}: {place}: {error.strerror or error}", fix)
    return ok(f"{folder} is writable" if place == folder else f"{folder} can be made")

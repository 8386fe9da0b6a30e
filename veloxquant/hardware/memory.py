"""Main memory, total and available now, as far as this process may use it: a container's limit counts."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `limit` says whose limit made the total smaller than the machine's, if one did."""

    total_bytes: int
    available_bytes: int
    limit: str | None = None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A control group's limit, and what of it is free: limit - (current - file cache that can be dropped)."""

    limit_bytes: int
    free_bytes: int
    file: str


def read() -> Memory:
    """What psutil reports, cut to the tightest control group. Raises what psutil raises."""
    import psutil

    facts = psutil.virtual_memory()
    return cut(int(facts.total), int(facts.available), limits() if sys.platform == "linux" else ())


def cut(total_bytes: int, available_bytes: int, groups: tuple[Limit, ...]) -> Memory:
    """The machine's memory under these limits. One above the machine's total is no limit."""
    real = [group for group in groups if group.limit_bytes < total_bytes]
    tightest = min(real, key=lambda group: group.limit_bytes, default=None)
    available = min([available_bytes, *(max(group.free_bytes, 0) for group in real)])
    if tightest is None:
        return Memory(total_bytes=total_bytes, available_bytes=available)
    return Memory(
        total_bytes=tightest.limit_bytes,
        available_bytes=available,
        limit=f"container limit {tightest.file}; the machine has {total_bytes} bytes",
    )


def limits(root: Path = _CGROUP_ROOT, own: Path = _SELF) -> tuple[Limit, ...]:
    """Limits of this process's control group and all above it, versions 2 and 1."""
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found: list[Limit] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            found += _chain(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _chain(root / "memory", path, names)
    return tuple(found)


def _chain(root: Path, path: str, names: tuple[str, str, str]) -> list[Limit]:
    """The group at `path` and its parents up to the root. A path from outside the namespace leaves only the root."""
    parts = [part for part in path.split("/") if part]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)] if ".." not in parts else [root]
    return [limit for folder in folders if (limit := _limit(folder, *names)) is not None]


def _limit(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> Limit | None:
    limit = _whole(_text(folder / limit_name))
    if limit is None or limit <= 0:
        return None
    stats = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
    used = (_whole(_text(folder / usage_name)) or 0) - (_whole(stats.get(cache_key, "")) or 0)
    return Limit(limit_bytes=limit, free_bytes=limit - max(used, 0), file=str(folder / limit_name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _whole(text: str) -> int | None:
    """Anything that is no number, such as "max", gives None."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None  # noqa: PLR2004 -- 64 bits

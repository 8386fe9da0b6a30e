"""A profile with some facts given: this machine with another limit, or "as if on" a machine that is not here.

Naming a chip, a memory size, or a working set that this machine cannot have describes another machine: what is known
of this one's chip or memory then no longer counts. Chip facts come from the chip table. The working set of a Mac that
is not here comes from what Macs of that memory size reported, and is unknown where none did: it is never computed from
a ratio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted
from veloxquant.hardware import chips, recorded
from veloxquant.hardware.findings import MOST_CORES, MOST_TEXT, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from veloxquant.profiles import HardwareProfile

_MOST_GBPS = 1_000_000


def with_overrides(profile: HardwareProfile, overrides: Mapping[str, Any]) -> HardwareProfile:
    """The profile with these facts given; keys as in the protocol's `hardware`, None means not given.

    Raises InvalidParams naming the key that is unknown, of the wrong type or out of range.
    """
    given = {key: _checked(key, value) for key, value in overrides.items() if value is not None or key not in _KEYS}
    if not given:
        return profile
    fields, sources = dict[str, Any](), dict(profile.sources)
    if "chip" in given or ("gpu_cores" in given and chips.parse(profile.chip)):
        _as_if_chip(profile, given, fields, sources)
    if is_elsewhere(profile, given):
        _as_if_memory(profile, given, fields, sources)
    _as_if_system(given, fields, sources)
    for key, value in given.items():
        _put(fields, sources, key, value, "given")
    return msgspec.structs.replace(profile, **fields, sources=sources)


def _as_if_chip(
    profile: HardwareProfile, given: Mapping[str, Any], fields: dict[str, Any], sources: dict[str, str]
) -> None:
    """Chip facts of the table. A GPU core count alone means this machine's chip in another variant."""
    name = given.get("chip", profile.chip)
    parsed = chips.parse(name)
    facts = chips.lookup(name, given.get("gpu_cores")) if name else None
    label = f"as if on {name}"
    if "chip" in given:
        for field in ("gpu_cores", "performance_cores", "efficiency_cores"):
            _put(fields, sources, field, None, f"{label}: not given")
        backend, why = ("metal", label) if parsed else (None, f"{label}: not an Apple M chip")
        _put(fields, sources, "backend", backend, why)
    for field, value in (
        ("generation", parsed.generation if parsed else None),
        ("tier", parsed.tier if parsed else None),
        ("bandwidth_gbps", facts.bandwidth_gbps if facts else None),
        ("prefill_tflops", facts.prefill_tflops if facts else None),
        ("decode_efficiency", facts.decode_efficiency if facts else {}),
    ):
        known = facts.sources.get(field, "the chip's name") if facts else "not an Apple M chip"
        _put(fields, sources, field, value, f"{label}: {known}")


def is_elsewhere(profile: HardwareProfile, given: Mapping[str, Any]) -> bool:
    """Whether another machine's memory is described: by chip, by size, or by a working set this one cannot have.

    What is in use on this one then counts for nothing.
    """
    if "chip" in given or "total_memory_bytes" in given:
        return True
    if "working_set_bytes" not in given:
        return False
    total = profile.total_memory_bytes
    return profile.working_set_bytes is None or (total is not None and given["working_set_bytes"] > total)


def _as_if_memory(
    profile: HardwareProfile, given: Mapping[str, Any], fields: dict[str, Any], sources: dict[str, str]
) -> None:
    """Another machine's memory: nothing of this one's is left, and nothing is active on it."""
    total = given.get("total_memory_bytes")
    if "working_set_bytes" in given:
        # The given working set is the limit; this machine's memory must not lower it.
        _put(fields, sources, "total_memory_bytes", total, "as if: not given, the working set is")
    elif total is None:
        total = profile.total_memory_bytes
        sources["total_memory_bytes"] = "as if: not given, taken to be as much as here"
    record = _record(profile, given, total)
    _put(fields, sources, "available_bytes", None, "as if: not given")
    if record is None:
        reason = _no_record(given.get("chip", profile.chip), total)
        _put(fields, sources, "working_set_bytes", None, reason)
        _put(fields, sources, "max_buffer_bytes", None, reason)
    else:
        _put(fields, sources, "working_set_bytes", record.working_set_bytes, f"as if: {record.sentence}")
        _put(fields, sources, "max_buffer_bytes", *_buffer(record))
    _put(fields, sources, "active_bytes", 0, "as if: nothing else runs there")
    _put(fields, sources, "wired_limit_bytes", None, "as if: the system's default limit")


def _as_if_system(given: Mapping[str, Any], fields: dict[str, Any], sources: dict[str, str]) -> None:
    """The engine's version stays (its rules size the caches); the operating system is the other machine's."""
    if "chip" in given:
        for field in ("os_name", "os_version", "macos_version", "low_power_mode"):
            _put(fields, sources, field, None, "as if: not given")
    if "macos_version" in given:
        _put(fields, sources, "os_name", "macOS", "given")
        _put(fields, sources, "os_version", given["macos_version"], "given")


def _record(profile: HardwareProfile, given: Mapping[str, Any], total: int | None) -> recorded.WorkingSet | None:
    apple = chips.parse(given.get("chip", profile.chip)) is not None
    return recorded.working_set(total, given.get("macos_version")) if apple and total is not None else None


def _buffer(record: recorded.WorkingSet) -> tuple[int, str]:
    """The recorded limit of one buffer, else the share of the default working set that current systems allow."""
    if record.max_buffer_bytes is not None:
        return record.max_buffer_bytes, f"as if: {record.sentence}"
    share = recorded.BUFFER_SHARE
    return int(record.working_set_bytes * share), f"as if: {share} x the default working set; that is {record.sentence}"


def _no_record(chip: str | None, total: int | None) -> str:
    if chips.parse(chip) is None:
        return "as if: no recorded reports for what is not an Apple M chip"
    if total is None:
        return "as if: total_memory_bytes is unknown"
    return f"as if: no report of a Mac with {total} bytes of memory is known"


def _put(fields: dict[str, Any], sources: dict[str, str], field: str, value: Any, source: str) -> None:
    fields[field] = value
    sources[field] = source


def _checked(key: str, value: Any) -> Any:
    check = _KEYS.get(key)
    if check is None:
        hint = _near(str(key), tuple(_KEYS), most=1)
        raise InvalidParams(f"hardware.{key} is not known", hint=hint, field=f"hardware.{key}")
    return check(f"hardware.{key}", value)


def _size(field: str, value: Any, least: int = 1) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_WHOLE:
        return value
    raise _refusal(
        field, value, f"a whole number of bytes from {least} to {MAX_WHOLE}", "16 GB of a Mac are 17179869184"
    )


def _amount(field: str, value: Any) -> int:
    return _size(field, value, 0)


def _cores(field: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_CORES:
        return value
    raise _refusal(field, value, f"a whole number from 1 to {MOST_CORES}", "leave it out when it is unknown")


def _rate(field: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and 0 < value <= _MOST_GBPS and math.isfinite(value):
        return float(value)
    raise _refusal(field, value, f"a number of GB/s above 0 and up to {_MOST_GBPS}", "GB/s are 1e9 bytes a second")


def _name(field: str, value: Any) -> str:
    found = text(value)
    if found is not None and value.isprintable() and len(value) <= MOST_TEXT:
        return chips.clean(found) or found
    raise _refusal(field, value, f"one line of at most {MOST_TEXT} characters", 'give a name such as "Apple M4 Max"')


def _chip(field: str, value: Any) -> str:
    """Any processor may be named; one called Apple's must be an M chip, or planning would know nothing of it."""
    name = _name(field, value)
    if name.split()[0].lower() != "apple" or chips.parse(name):
        return name
    raise InvalidParams(
        f"{field} is {name!r}; Apple's are called Apple M, a number, then Pro, Max, Ultra or nothing",
        hint=_near(name, chips.names(), most=3),
        field=field,
    )


def _near(word: str, known: Sequence[str], *, most: int) -> str:
    """What to say about a word that is not known: those that come close, else all."""
    import difflib

    close = difflib.get_close_matches(word, known, n=most)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"


def _version(field: str, value: Any) -> str:
    found = text(value)
    if found is not None and found[0].isdigit() and " " not in found:
        return found
    raise _refusal(field, value, "a version", 'give it as text, such as "26.1"')


def _refusal(field: str, value: Any, expected: str, hint: str) -> InvalidParams:
    return InvalidParams(f"{field} is {quoted(value)}, which is not {expected}", hint=hint, field=field)


_KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    "chip": _chip,
    "gpu_cores": _cores,
    "total_memory_bytes": _size,
    "working_set_bytes": _size,
    "active_bytes": _amount,
    "max_buffer_bytes": _size,
    "bandwidth_gbps": _rate,
    "mlx_version": _version,
    "macos_version": _version,
}
KEYS = tuple(_KEYS)
"""What may be given."""

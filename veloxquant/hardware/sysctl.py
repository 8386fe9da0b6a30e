"""macOS kernel values by name, without starting a process. Apple only: not run on a Mac."""

from __future__ import annotations

import ctypes

_MOST_BYTES = 1024


def read(name: str) -> int | str | None:
    """The value of one name, None when the kernel has no such name. Raises OSError where sysctlbyname is missing."""
    raw = _raw(name)
    return None if raw is None else decode(raw)


def decode(raw: bytes) -> int | str:
    """Four or eight bytes are a whole number, unless they are text that ends in NUL; anything else is text."""
    text = raw.rstrip(b"\0")
    printable = len(text) >= 2 and raw.endswith(b"\0") and all(32 <= byte < 127 for byte in text)  # noqa: PLR2004 -- ASCII
    if len(raw) in (4, 8) and not printable:
        return int.from_bytes(raw, "little", signed=True)
    return text.decode("utf-8", "replace")


def _raw(name: str) -> bytes | None:
    try:
        call = ctypes.CDLL(None).sysctlbyname
    except AttributeError:
        raise OSError("this system has no sysctlbyname") from None
    call.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    buffer, size = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_size_t(_MOST_BYTES)
    failed = call(name.encode("ascii"), buffer, ctypes.byref(size), None, 0)
    return None if failed else buffer.raw[: size.value]

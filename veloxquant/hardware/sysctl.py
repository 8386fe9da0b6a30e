"""macOS kernel values by name, without starting a process. Apple only: not run on a Mac."""

from __future__ import annotations

import ctypes

_MOST_BYTES = 1024


def whole(name: str) -> int | None:
    """A whole number, None when the kernel has no such name. Raises OSError where there is no sysctlbyname."""
    raw = _read(name)
    return None if raw is None else decode_whole(raw)


def text(name: str) -> str | None:
    """A text, None when the kernel has no such name. Raises OSError where there is no sysctlbyname."""
    raw = _read(name)
    return None if raw is None else decode_text(raw)


def decode_whole(raw: bytes) -> int:
    """Four or eight bytes, least significant first, as both Intel and Apple processors keep them."""
    if len(raw) not in (4, 8):
        raise OSError(f"{len(raw)} bytes are no whole number")
    return int.from_bytes(raw, "little", signed=True)


def decode_text(raw: bytes) -> str:
    """Bytes up to the first NUL."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def _read(name: str) -> bytes | None:
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

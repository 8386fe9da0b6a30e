"""Files of the store: written whole or not at all, read only when they are small regular files.

A write goes to a temporary file in the same folder, is flushed to the disk, renamed over its place, and the folder is
flushed too; when the call returns, the file survives a crash. Nothing here knows what a record is.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import ownership
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from typing import Self

MAX_RECORD_BYTES = 64 * 1024
RECORD_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.json", re.ASCII)
_TEMPORARY = re.compile(r"\.vq-[\w.-]+\.tmp", re.ASCII)

_NUMBERS = struct.Struct("<4Q")
_MASK = 2**64 - 1
_ENTRIES = 256

_HINTS = {
    errno.ENOSPC: "free some space on the disk; nothing that was stored is lost",
    errno.EDQUOT: "free some of your quota; nothing that was stored is lost",
    errno.EROFS: "the file system is read-only: choose another records.directory",
    errno.EACCES: "make the folder yours (chown, chmod u+rwx) or choose another records.directory",
    errno.EPERM: "make the folder yours (chown, chmod u+rwx) or choose another records.directory",
    errno.ENOTDIR: "something that is not a folder is in the way: move it, or choose another records.directory",
    errno.EEXIST: "something that is not a folder is in the way: move it, or choose another records.directory",
}


class Signature(bytes):
    """What tells that a file is still the one that was read. Two equal ones can differ within a clock tick.

    Four numbers in 32 bytes: as Python's own they would take three times as much of each record that is held.
    """

    __slots__ = ()

    def __new__(cls, inode: int, size: int, mtime_ns: int, ctime_ns: int) -> Self:
        """Times are kept modulo 2**64 ns: one before 1970 counts as far ahead, and so never as settled."""
        return super().__new__(cls, _NUMBERS.pack(inode, size, mtime_ns & _MASK, ctime_ns & _MASK))

    inode = property(lambda self: int(_NUMBERS.unpack(self)[0]))
    size = property(lambda self: int(_NUMBERS.unpack(self)[1]))
    mtime_ns = property(lambda self: int(_NUMBERS.unpack(self)[2]))
    ctime_ns = property(lambda self: int(_NUMBERS.unpack(self)[3]))


class Unreadable(Exception):
    """This file is not read; the text says why. Never leaves the room."""


def signature(status: os.stat_result) -> Signature:
    """The parts of a stat that change with content."""
    return Signature(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def reaching(path: Path, purpose: str) -> Iterator[None]:
    """Turn what the system says of `path` into StoreUnavailable with a way out."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        hint = _HINTS.get(error.errno or 0, "check the folder with `ls -ld`, or choose another records.directory")
        raise StoreUnavailable(f"cannot {purpose} {path}: {reason}", hint=hint) from error


def placed(directory: Path | str) -> Path:
    """The directory as an absolute path, ~ expanded and links left as they are. Raises StoreUnavailable."""
    try:
        chosen = Path(directory).expanduser()
    except RuntimeError as error:
        hint = "give an absolute path, or set HOME"
        raise StoreUnavailable(f"cannot find the home that {str(directory)!r} starts with", hint=hint) from error
    return Path(os.path.abspath(chosen))  # noqa: PTH100 -- resolve() would pin a symlinked root


def check_writers(folder: Path) -> None:
    """Raise StoreUnavailable where others may put records of theirs: a folder that is not there is nobody's yet."""
    with reaching(folder, "look at"):
        try:
            who = ownership.others(folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            return
    if who is not None:
        raise StoreUnavailable(
            f"{folder} can be written by others ({who}), who would decide what is planned",
            hint=f"chmod go-w '{folder}', or choose a records.directory of your own",
        )


def make_folder(path: Path) -> None:
    """Create a folder and its parents, for us to write, so that they survive a crash. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir(mode=0o755)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        flush_folder(path.parent)


def write_atomically(path: Path, data: bytes, *, durable: bool = True, flush: bool = True) -> Signature:
    """Put `data` at `path` by a rename; returns the signature of the new file.

    Raises OSError, and then the old file is untouched and no temporary file is left. `durable=False` skips the flushes,
    for what can be made again; `flush=False` that of the folder only, for one of many writes.
    """
    temporary = write_aside(path, data, durable=durable)
    try:
        temporary.replace(path)
    except BaseException:
        drop(temporary)
        raise
    if durable and flush:
        flush_folder(path.parent)
    return signature(os.lstat(path))


def write_aside(path: Path, data: bytes, *, durable: bool = True) -> Path:
    """Write `data` to a temporary file beside `path`, for a rename. Raises OSError, and then there is no such file."""
    temporary = path.with_name(f".vq-{path.name}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        drop(temporary)
        raise
    return temporary


def drop(temporary: Path) -> None:
    """Delete a temporary file, if it is still there and can be deleted."""
    with suppress(OSError):
        temporary.unlink()


def flush_folder(path: Path) -> None:
    """Make renames and deletions in a folder survive a crash. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; their server orders the rename itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def list_folder(
    folder: Path, known: Container[str] = (), rest: Callable[[], None] | None = None
) -> tuple[dict[str, Signature | str | None], list[str]]:
    """What is in a folder of records: name -> signature, or why that entry is not read; and stray temporary files.

    Names that are not `known` get None in place of a signature: they are read anyway, and reading tells it.
    Names that are no records by convention (hidden, editors' backups, other suffixes) are left out.
    `rest` is called every few hundred entries, which is about 1 ms.
    Raises OSError; a folder that does not exist is empty.
    """
    found: dict[str, Signature | str | None] = {}
    strays: list[str] = []
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return found, strays
    with entries:
        for count, entry in enumerate(entries, 1):
            if rest is not None and count % _ENTRIES == 0:
                rest()
            name = entry.name
            if name[0] in ".#":
                strays += [name] * bool(_TEMPORARY.fullmatch(name))
            elif name.endswith(".json"):
                _look(entry, name in known, found)
    return found, strays


def _look(entry: os.DirEntry[str], is_known: bool, found: dict[str, Signature | str | None]) -> None:
    name = entry.name
    if RECORD_NAME.fullmatch(name) is None:
        found[os.fsencode(name).decode("utf-8", "backslashreplace")] = (
            "its name is not made of letters, digits and . _ - with a letter or digit first"
        )
    elif not is_known:
        found[name] = None
    else:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        found[name] = why_not(status) or signature(status)


def why_not(status: os.stat_result) -> str | None:
    """Why a directory entry is not read as a record, None when it may be."""
    if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_RECORD_BYTES:
        return None
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if stat.S_ISDIR(status.st_mode):
        return "it is a folder"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    return f"it has {status.st_size} bytes, more than {MAX_RECORD_BYTES}"


def read_small(path: str | Path, folder: int | None = None) -> tuple[bytes, Signature]:
    """Content and signature of a record file; with the descriptor of an open folder, of a name in it.

    Raises FileNotFoundError, and Unreadable for anything that is not a small regular file we may read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block us
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
        try:
            return _read_open(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        loop = error.errno == errno.ELOOP
        raise Unreadable("it is a symbolic link" if loop else f"it cannot be read: {error.strerror}") from error


def _read_open(descriptor: int) -> tuple[bytes, Signature]:
    # The signature is from before the reading: a write in between shows as a change at the next look.
    status = os.fstat(descriptor)
    reason = why_not(status)
    if reason is not None:
        raise Unreadable(reason)
    data = os.read(descriptor, MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise Unreadable(f"it has more than {MAX_RECORD_BYTES} bytes")
    return data, signature(status)

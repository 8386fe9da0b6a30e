"""Files of the agent: written whole or not at all, one writer at a time, and only if they differ."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from veloxquant import ownership, plain_file, socket_probe
from veloxquant.errors import ServiceFailed, ServiceRefused
from veloxquant.service.values import INSTALL

if TYPE_CHECKING:
    from collections.abc import Iterator

MODE = 0o644
"""launchd loads no agent that its group or others could write; systemd warns of files that others cannot read."""
MOST_BYTES = 2**20
"""Of a file that is read: the agent's have a few thousand."""
_STAGED = ".new"


@contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Hold the folder's own lock, so that a second install waits; the folder is made where it is missing.

    A lock on the folder leaves no file behind. Raises ServiceRefused when the folder cannot be made or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ServiceRefused(
            f"{folder} cannot be used: {error.strerror}", hint=f"make it a folder of your own: ls -ld '{folder}'"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def same(path: Path, content: bytes) -> bool:
    """Whether the file holds exactly these bytes and others cannot write it."""
    try:
        return plain_file.read(path, MOST_BYTES) == content and not path.stat().st_mode & 0o022
    except OSError:
        return False


def refuse_link(path: Path) -> None:
    """Raises ServiceRefused for a symbolic link: whoever made it looks after the file, and we would replace it."""
    if path.is_symlink() and path.readlink() == Path(os.devnull):
        raise ServiceRefused(f"{path.name} is masked", hint=f"systemctl --user unmask {path.name}")
    if path.is_symlink():
        raise ServiceRefused(
            f"{path} is a symbolic link to {path.readlink()}",
            hint="remove the link first; what it leads to is left alone",
        )


def not_ours(path: Path, what: str, why: str) -> ServiceRefused:
    """The error for a file of our name that is somebody else's."""
    return ServiceRefused(f"{path} is not veloxquant's {what}: {why}", hint=f"move it away, then: {INSTALL}")


class Staged:
    """The new content on the disk, beside its place: what can fail (space, rights) fails before anything is stopped."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Call with the folder held. Raises ServiceRefused when the folder cannot be written."""
        self.path = path
        try:
            remove_staged(path)
            # launchd and systemd look at names that end in .plist, .service, .socket: this one does not.
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_STAGED, dir=path.parent)
        except OSError as error:
            raise _unwritable(path, error) from None
        self._staged = Path(name)
        try:
            with open(descriptor, "wb") as stream:  # noqa: PTH123 -- a descriptor
                stream.write(content)
                stream.flush()
                os.fchmod(descriptor, MODE)
                os.fsync(descriptor)
        except OSError as error:
            self._staged.unlink(missing_ok=True)
            raise _unwritable(path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._staged.unlink(missing_ok=True)

    def publish(self) -> None:
        """Put it in its place. Raises ServiceRefused."""
        try:
            self._staged.replace(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        _sync(self.path.parent)


def remove_staged(path: Path) -> None:
    """What an install that was killed had staged for this place. Call with the folder held. Raises OSError."""
    for left in path.parent.glob(f".{path.name}.*{_STAGED}"):
        left.unlink()


def remove(path: Path) -> bool:
    """Remove a file of ours, and what was staged for it; whether there was one. Raises ServiceRefused."""
    try:
        remove_staged(path)
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ServiceRefused(
            f"{path} cannot be removed: {error.strerror}", hint=f"chmod u+w '{path.parent}', then try again"
        ) from None
    _sync(path.parent)
    return True


def refuse_open_folder(socket_path: Path) -> None:
    """Raises ServiceRefused for a socket in a folder that others may look into: the daemon would not serve there."""
    try:
        facts = socket_path.parent.stat()
    except OSError:
        return  # it is made, private, by whoever opens the socket
    elsewhere = "name a socket in a folder of its own"
    for why, hint in (
        (ownership.foreign(facts), elsewhere),
        (ownership.not_private(facts), f"chmod 700 '{socket_path.parent}', or {elsewhere}"),
    ):
        if why is not None:
            raise ServiceRefused(f"the socket's folder {socket_path.parent} {why}", hint=hint, field="socket.path")


def private_folder(folder: Path) -> None:
    """Make the folder of a socket that the manager opens: launchd makes none. Raises ServiceFailed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ServiceFailed(
            f"the socket's folder {folder} cannot be made: {error.strerror}",
            hint="set VELOXQUANT_SOCKET to a path in a folder that you can write",
        ) from None


def remove_dead_socket(path: Path) -> None:
    """Remove a socket of ours on which nobody listens any more; anything else at the path stays."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.geteuid() and not socket_probe.answers(path):
            path.unlink()


def _unwritable(path: Path, error: OSError) -> ServiceRefused:
    return ServiceRefused(
        f"{path} cannot be written: {error.strerror}", hint=f"make the folder yours to write: ls -ld '{path.parent}'"
    )


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems know no fsync of folders
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

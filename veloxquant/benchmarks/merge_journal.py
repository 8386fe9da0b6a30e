"""What a merge is about to change, written down before it does, so that one which is cut off can be undone.

`.merge.json` in the benchmark directory holds the files that will be replaced or deleted, byte for byte, and what tells
the files that the merge writes. It is on the disk before the first record changes and deleted when the last one is
there for good: the deletion is the moment at which a merge has happened. One merge runs at a time, under a lock of its
own that dies with its process; so a journal whose lock is free is one that nobody will finish.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from veloxquant.benchmarks.folder import digest_of
from veloxquant.benchmarks.lock import StoreLock
from veloxquant.benchmarks.record_text import encode
from veloxquant.benchmarks.storage import (
    RECORD_NAME,
    Unreadable,
    flush_folder,
    make_folder,
    reaching,
    read_small,
    write_atomically,
)
from veloxquant.errors import StoreUnavailable
from veloxquant.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from veloxquant.benchmarks.folder import RecordFolder
    from veloxquant.benchmarks.merge_plan import MergePlan

NAME = ".merge.json"
_LOCK = ".merge.lock"
_VERSION = 1
_PATIENCE_S = 300.0
"""A merge of 100,000 records takes minutes, and the next one waits for it."""


class _Pages(msgspec.Struct):
    """The journal as it stands on the disk; bytes in base64."""

    version: int = _VERSION
    wrote: dict[str, list[str]] = {}
    """By id, the digests of the files that the merge writes."""
    replaced: dict[str, bytes] = {}
    """Files by name, as they were: of an id that the merge writes."""
    deleted: dict[str, bytes] = {}
    """Files by name, as they were: of an id that the merge deletes or evicts."""


class MergeJournal:
    """The journal of one directory. Who writes or undoes holds `lock`, and for the records the store's as well."""

    def __init__(self, directory: Path, folder: RecordFolder) -> None:
        self.lock = StoreLock(directory / _LOCK, timeout_s=_PATIENCE_S)
        self._path = directory / NAME
        self._folder = folder
        self._pages = _Pages()
        self._owner: int | None = None

    def is_abandoned(self) -> bool:
        """Whether there is a journal that this process does not write. Another may be at work on it; the lock tells."""
        return self._owner != os.getpid() and os.path.lexists(self._path)

    def begin(self) -> None:
        """A merge of ours begins. Raises StoreUnavailable in the middle of another of this object's."""
        if self._owner == os.getpid():
            raise StoreUnavailable(
                f"a merge into {self._path.parent} is under way and asks for another", hint="merge when it has ended"
            )
        self._owner, self._pages = os.getpid(), _Pages()

    def note(self, plan: MergePlan) -> None:
        """Write down what a plan will change, beside what earlier plans of the same merge did. Raises StoreUnavailable.

        What others put since an earlier plan takes the place of what was noted; what the merge itself put does not.
        """
        away = [*plan.deletes, *(victim.record.id for victim in plan.evicted)]
        if not (plan.puts or away):
            return
        pages = self._pages
        ours = _digests(pages)
        for record in plan.puts:
            self._keep(record.id, pages.replaced, ours)
        for record_id in away:
            self._keep(record_id, pages.deleted, ours)
        for record in plan.puts:
            pages.wrote.setdefault(record.id, []).append(digest_of(encode(record)).hex())
        with reaching(self._path, "write"):
            write_atomically(self._path, msgspec.json.encode(pages))

    def end(self) -> None:
        """All of it is done, or none of it is left. Raises StoreUnavailable, and then it is to be undone."""
        with reaching(self._path, "delete"):
            if os.path.lexists(self._path):
                self._path.unlink()
                flush_folder(self._path.parent)
        self._owner = None

    def leave(self) -> None:
        """It could not be undone now: the next who can write does."""
        self._owner = None

    def undo(self) -> None:
        """Make every file that the merge wrote or deleted what it was before, unless another program has been there.

        What is equal to the byte to what the merge wrote counts as its own. May be repeated from any point of it.
        Raises StoreUnavailable.
        """
        pages = self._read()
        ours = _digests(pages)
        with reaching(self._folder.path, "create"):
            make_folder(self._folder.path)
        for name in self._names(pages.wrote):
            if name not in pages.replaced and name not in pages.deleted and self._now(name) in ours:
                self._folder.restore(name, None)
        for name, data in pages.replaced.items():
            if self._now(name) in ours:
                self._folder.restore(name, data)
        for name, data in pages.deleted.items():
            now = self._now(name)
            if now is None or now in ours:
                self._folder.restore(name, data)
        self._folder.flush()
        self.end()

    def _keep(self, record_id: str, place: dict[str, bytes], ours: set[str]) -> None:
        """Every file of an id as it is now, or as it was before an earlier plan of this merge wrote what is there."""
        for name in self._folder.files(record_id):
            with suppress(FileNotFoundError, Unreadable):
                data, _ = read_small(self._folder.path / name)
                earlier = [pages.pop(name, None) for pages in (self._pages.replaced, self._pages.deleted)]
                before = data if digest_of(data).hex() not in ours else next(filter(None, earlier), None)
                if before is not None:
                    place[name] = before

    def _now(self, name: str) -> str | None:
        digest = self._folder.digest(name)
        return None if digest is None else digest.hex()

    def _names(self, ids: Iterable[str]) -> list[str]:
        """The files of these ids, as the folder has them now."""
        found: list[str] = []
        for record_id in ids:
            self._folder.find(record_id)
            found += self._folder.files(record_id)
        return found

    def _read(self) -> _Pages:
        try:
            with reaching(self._path, "read"), open_plain(self._path, follow_link=False) as file:
                pages = msgspec.json.decode(file.read(), type=_Pages)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._unfit(str(error)) from error
        strange = [name for name in (*pages.replaced, *pages.deleted) if RECORD_NAME.fullmatch(name) is None]
        if pages.version != _VERSION:
            raise self._unfit(f"its version is {pages.version}, not {_VERSION}")
        if strange:
            raise self._unfit(f"{strange[0]!r} is no name of a record's file")
        return pages

    def _unfit(self, why: str) -> StoreUnavailable:
        hint = "move it away; what it says of an interrupted merge is then left as it is"
        return StoreUnavailable(f"{self._path} is no journal of a merge: {why}", hint=hint)


def _digests(pages: _Pages) -> set[str]:
    """Of all files that the merge writes. None is empty, as that of a file that cannot be read is."""
    return {digest for digests in pages.wrote.values() for digest in digests if digest}

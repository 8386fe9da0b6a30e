"""A whole directory looked at and nothing changed: what is set aside, and where the index differs from the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant.benchmarks import index, merge_journal
from veloxquant.benchmarks.folder import RecordFolder
from veloxquant.benchmarks.storage import list_folder, placed, reaching
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from veloxquant.benchmarks.folder import OnLook


@dataclass(frozen=True)
class Verdict:
    """What was found. `temporary` files belong to a write under way or to a killed writer, and hurt nobody.

    `.merge.json` among them is of a merge under way, or of a killed one that the next write undoes.
    """

    directory: str
    records: int
    total_bytes: int
    set_aside: dict[str, str]
    """File -> why it is not used."""
    index_differs: tuple[str, ...]
    """Sentences; none where a newer program wrote the index, which is its affair."""
    temporary: tuple[str, ...]
    sound: bool


def verify(directory: Path, on_look: OnLook | None = None) -> Verdict:
    """Read every record file and the index; `on_look` is told how many of how many.

    Raises StoreUnavailable when there is nothing to read, or no right to.
    """
    directory = placed(directory)
    if not directory.is_dir():
        raise StoreUnavailable(f"there is no folder {directory}", hint="name the benchmark directory: --records DIR")
    folder = RecordFolder(directory / index.RECORDS)
    strays = [f"{index.RECORDS}/{name}" for name in folder.refresh(on_look)]
    with reaching(directory, "read"):
        strays += list_folder(directory)[1]
    strays += [merge_journal.NAME] * (directory / merge_journal.NAME).exists()
    set_aside = {f"{index.RECORDS}/{name}": reason for name, reason in folder.skipped().items()}
    differs = tuple(_differences(directory / "index.json", folder))
    return Verdict(
        directory=str(directory),
        records=len(folder.records),
        total_bytes=folder.total_bytes,
        set_aside=set_aside,
        index_differs=differs,
        temporary=tuple(sorted(strays)),
        sound=not (set_aside or differs),
    )


def _differences(path: Path, folder: RecordFolder) -> Iterator[str]:
    found, listing = index.read(path), index.listing(folder, folder.records)
    if found.unreadable is not None:
        yield found.unreadable
    if not found.differs(listing):
        return
    content = found.content
    if content is None:
        yield "index.json is damaged" if path.exists() else "there is no index.json"
        return
    if content.get("version") != index.VERSION:
        yield f"its version is {content.get('version')!r}, not {index.VERSION}"
    listed = found.listed()
    if listed is None:
        yield "it has no mapping of records"
        return
    held = {one[0]: index.entry(one) for one in listing}
    for record_id in sorted(held.keys() | listed.keys()):
        if record_id not in listed:
            yield f"it lacks {record_id}"
        elif record_id not in held:
            yield f"it lists {record_id}, which is not there"
        elif index.said(listed[record_id]) != held[record_id]:
            yield f"it tells something else of {record_id}"

"""Answers that were given before, byte for byte, and the plans behind them.

An answer is a pure function of the params' bytes, the world and the model's files. It is kept for the world it was
made in, together with what the files looked like; a hit costs a look-up and a few stats. Nothing survives a change of
generation. Plans are kept longer, by id, so that `explain` can speak of an answer the client still holds.

What is kept is packed: a plan of 60 KB takes 8, and 40 us to unpack where planning takes 1 ms or more. Of those lately
asked for a few stay as they are.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from veloxquant.errors import PlanNotFound
from veloxquant.wire.answers import CacheState

ANSWER_BYTES = 3 * 2**20
PLAN_BYTES = 2**20
"""Some 300 plans of Llama-3.1-8B, and some 100 to explain: more of them would take the daemon beyond 60 MiB."""
PLAIN = 8
"""Answers that are kept as they are, too."""
_FASTEST = 1

Sight = tuple[tuple[str, int, int, int], ...]
"""What files looked like: (path, inode, size, mtime in ns); zeros for one that is not there."""


class Packed(NamedTuple):
    """An encoded result, compressed, and how long it was."""

    data: bytes
    length: int

    def unpack(self) -> bytes:
        """As it was."""
        return zlib.decompress(self.data, bufsize=max(1, self.length))


def pack(encoded: bytes) -> Packed:
    """Some 0.2 ms for a plan, which other threads can use."""
    return Packed(zlib.compress(encoded, _FASTEST), len(encoded))


class Answer(NamedTuple):
    """An encoded result and the files it depends on."""

    result: Packed
    files: Sight
    until: float = math.inf
    """On the monotonic clock."""


def look(folder: str | None) -> Sight:
    """What decides a model folder's profile, as it is now: its config, its weight files and their index.

    The folder itself counts too (a file added or removed moves its time, a link may point elsewhere), and in the hub's
    cache the choice of the snapshot. Nothing for an inline config.
    """
    if folder is None:
        return ()
    home = Path(folder).expanduser()
    watched = [home, home / "config.json"]
    with contextlib.suppress(OSError):
        watched += sorted(entry for entry in home.iterdir() if ".safetensors" in entry.name)
    if home.parent.name == "snapshots":
        watched += [home.parent, home.parent.parent / "refs" / "main"]
    return tuple(_seen(str(path)) for path in watched)


def unchanged(files: Sight) -> bool:
    """Whether every file still looks the same."""
    return all(_seen(file[0]) == file for file in files)


def _seen(path: str) -> tuple[str, int, int, int]:
    try:
        facts = os.stat(path)  # noqa: PTH116 -- on the path of every remembered answer; Path doubles its time
    except OSError:
        return (path, 0, 0, 0)
    return (path, facts.st_ino, facts.st_size, facts.st_mtime_ns)


class Answers:
    """Encoded results of the current generation by (method, params' bytes), bounded by bytes, least used out first."""

    def __init__(self, limit_bytes: int = ANSWER_BYTES) -> None:
        self.hits = 0
        self.misses = 0
        self.bytes = 0
        self._limit = limit_bytes
        self._generation = -1
        self._kept: OrderedDict[tuple[str, bytes], Answer] = OrderedDict()
        self._plain: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def get(self, generation: int, method: str, raw: bytes) -> bytes | None:
        """The result given before to the same bytes in the same world about the same files."""
        key = (method, raw)
        kept = self._kept.get(key) if generation == self._generation else None
        if kept is not None and (time.monotonic() > kept.until or not unchanged(kept.files)):
            self._forget(key)
            kept = None
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        plain = self._plain.pop(key, None)
        self._plain[key] = kept.result.unpack() if plain is None else plain
        if len(self._plain) > PLAIN:
            self._plain.popitem(last=False)
        return self._plain[key]

    def put(self, generation: int, method: str, raw: bytes, answer: Answer) -> None:
        """Keep an answer of this generation; an older generation's is of no use."""
        if generation < self._generation:
            return
        if generation > self._generation:
            self._kept.clear()
            self._plain.clear()
            self.bytes, self._generation = 0, generation
        key = (method, raw)
        if key in self._kept:
            self._forget(key)
        self._kept[key] = answer
        self.bytes += _weight(key, answer)
        while self.bytes > self._limit:
            self._forget(next(iter(self._kept)))

    def state(self) -> CacheState:
        """For `status`."""
        return CacheState(entries=len(self._kept), bytes=self.bytes, hits=self.hits, misses=self.misses)

    def _forget(self, key: tuple[str, bytes]) -> None:
        self.bytes -= _weight(key, self._kept.pop(key))
        self._plain.pop(key, None)


def _weight(key: tuple[str, bytes], answer: Answer) -> int:
    files = sum(len(file[0]) + 200 for file in answer.files)
    return len(key[1]) + len(answer.result.data) + files + 400


class Plans:
    """Encoded plans by id, bounded by bytes."""

    def __init__(self, limit_bytes: int = PLAN_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Packed] = OrderedDict()

    def put(self, plan_id: str, packed: Packed) -> None:
        """Remember this plan; it shares its bytes with the answer that carried it."""
        before = self._kept.pop(plan_id, None)
        self._bytes += len(packed.data) - (0 if before is None else len(before.data))
        self._kept[plan_id] = packed
        while self._bytes > self._limit:
            self._bytes -= len(self._kept.popitem(last=False)[1].data)

    def get(self, plan_id: str) -> bytes:
        """The plan of that id. Raises PlanNotFound."""
        packed = self._kept.get(plan_id)
        if packed is None:
            raise PlanNotFound(
                f"no plan {plan_id!r} is remembered",
                hint="ask for the plan again; plans are kept in memory, the newest first",
                field="plan_id",
            )
        self._kept.move_to_end(plan_id)
        return packed.unpack()

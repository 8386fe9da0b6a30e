"""Answers that were given before, byte for byte, and the plans behind them.

An answer is a pure function of the params' bytes, the world and the model's files. It is kept for the world it was
made in, together with what the files looked like; a hit costs a look-up and a few stats. Nothing survives a change that
it depends on: of answers about another machine those do that only this one's memory moved for. Plans are kept longer,
by id, so that `explain` can speak of an answer the client still holds.

What is kept is packed: a plan of 60 KB takes 8, and 40 to 100 us to unpack where planning takes 1 ms or more. What is
asked for again and again stays as it is, too, for as long as that goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.daemon.bounded import Bounded
from veloxquant.errors import PlanNotFound
from veloxquant.wire.answers import CacheState

if TYPE_CHECKING:
    from veloxquant.daemon.state import Era

ANSWER_BYTES = 3 * 2**20
PLAN_BYTES = 2**20
"""Some 300 plans of Llama-3.1-8B, and some 100 to explain: more of them would take the daemon beyond 60 MiB."""
PLAIN_BYTES = 18 * 2**20
"""Of answers that are kept as they are, too: some 300, a question of its own for each of as many clients. A daemon at
work may hold them beyond the 60 MiB; one at rest has none (`rest`)."""
_FASTEST = 1

_Key = tuple[str, bytes]
"""Method and params of a question."""

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
    generation: int
    elsewhere: bool = False
    """About another machine."""
    until: float = math.inf
    """On the monotonic clock."""

    def holds(self, era: Era) -> bool:
        """Whether nothing changed that it depends on, but for the files."""
        return self.generation == (era.elsewhere if self.elsewhere else era.here)


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
    """Encoded results of the current world by (method, params' bytes), bounded by bytes, least used out first.

    An answer that is asked for again is held as it is sent, too, until nobody asks for it any more.
    """

    def __init__(self, limit_bytes: int = ANSWER_BYTES, plain_bytes: int = PLAIN_BYTES) -> None:
        self.hits = 0
        self.misses = 0
        self._era: Era | None = None
        self._plain: Bounded[_Key, _Plain] = Bounded(plain_bytes, lambda _key, plain: len(plain.result))
        self._kept: Bounded[_Key, Answer] = Bounded(limit_bytes, _weight, self._plain.drop)

    @property
    def packed_bytes(self) -> int:
        """Of what is kept packed."""
        return self._kept.bytes

    def get(self, era: Era, method: str, raw: bytes) -> bytes | None:
        """The result given before to the same bytes in the same world about the same files."""
        key = (method, raw)
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and (not kept.holds(era) or now > kept.until or not unchanged(kept.files)):
            self._kept.drop(key)
            kept = None
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        held = self._plain.get(key)
        if held is None:
            held = _Plain(kept.result.unpack())
            self._plain.put(key, held)
        held.asked_at = now
        return held.result

    def put(self, era: Era, method: str, raw: bytes, answer: Answer) -> None:
        """Keep an answer that holds now; what came too late, or holds no longer, is of no use."""
        if era != self._era:
            self._kept.drop_where(lambda kept: not kept.holds(era))
            self._era = era
        if answer.holds(era):
            self._kept.put((method, raw), answer)

    def state(self) -> CacheState:
        """For `status`."""
        held = self.packed_bytes + self._plain.bytes
        return CacheState(entries=len(self._kept), bytes=held, hits=self.hits, misses=self.misses)

    def rest(self, unasked_s: float) -> None:
        """Keep packed alone what nobody asked for during so many seconds."""
        before = time.monotonic() - unasked_s
        while (oldest := self._plain.oldest()) is not None and oldest[1].asked_at < before:
            self._plain.drop(oldest[0])


@dataclass(slots=True)
class _Plain:
    """An answer as it is sent."""

    result: bytes
    asked_at: float = 0.0
    """When somebody last asked for it, on the monotonic clock."""


def _weight(key: _Key, answer: Answer) -> int:
    files = sum(len(file[0]) + 200 for file in answer.files)
    return len(key[1]) + len(answer.result.data) + files + 400


class Plans:
    """Encoded plans by id, bounded by bytes."""

    def __init__(self, limit_bytes: int = PLAN_BYTES) -> None:
        self._kept: Bounded[str, Packed] = Bounded(limit_bytes, lambda _id, packed: len(packed.data))

    def put(self, plan_id: str, packed: Packed) -> None:
        """Remember this plan; it shares its bytes with the answer that carried it."""
        self._kept.put(plan_id, packed)

    def get(self, plan_id: str) -> bytes:
        """The plan of that id. Raises PlanNotFound."""
        packed = self._kept.get(plan_id)
        if packed is None:
            raise PlanNotFound(
                f"no plan {plan_id!r} is remembered",
                hint="ask for the plan again; plans are kept in memory, the newest first",
                field="plan_id",
            )
        return packed.unpack()

"""What the soak does to a daemon: fifty clients at a walking pace, and everything that clients should not do.

Every job is one coroutine function that does one round. The soak repeats rounds at a pace; a test runs some rounds and
counts. A round raises when an answer is wrong or missing; nothing here is forgiven silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import soak_abuse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DATA = Path(__file__).parent / "data"
LLAMA = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
MODEL = {"config": LLAMA, "model_id": "meta-llama/Meta-Llama-3.1-8B", "weights_bytes": 9 * 2**29}
HARDWARE = {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * 2**30, "working_set_bytes": 11 * 2**30}
LINE_BYTES = 2**20
ANSWER_S = 60.0
"""An answer that takes longer is lost."""
ASKERS, WATCHERS, COMERS = 40, 5, 5
"""Clients that keep a connection; that listen as well; that connect for each question. Fifty together."""
CALLS_A_SECOND = 85.0
"""All askers together; comers, watchers, abuse and the probe bring the total to some 150."""
_TRIES = 3
_MIX = {
    "ping": 20,
    "hello": 3,
    "old_plan": 26,
    "new_plan": 22,
    "explained": 6,
    "fit": 3,
    "methods": 3,
    "records": 4,
    "hardware": 2,
    "status": 3,
    "metrics": 2,
    "wrong": 5,
    "unknown_plan": 1,
}
"""How often each kind of question is asked."""


class SoakError(Exception):
    """An answer that is wrong, or none."""


class Forgotten(SoakError):
    """The daemon no longer remembers a plan."""


@dataclass
class Tally:
    """What was done, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        """Note it; the first hundred are enough to see what is the matter."""
        self.counts["trouble"] += 1
        if len(self.trouble) < 100:
            self.trouble.append(text)


@dataclass(frozen=True)
class Job:
    """One round of something, and the seconds from one round to the next, on average."""

    name: str
    work: Callable[[int], Awaitable[None]]
    pause_s: float


class Line:
    """One connection: a question, its answer, and notices in between."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self.generation = 0
        self.notices = 0

    @classmethod
    async def open(cls, path: Path) -> Line:
        """Connect."""
        return cls(*await asyncio.open_unix_connection(path, limit=LINE_BYTES))

    async def call(self, method: str, params: dict[str, Any] | None = None, *, refused: str | None = None) -> Any:
        """The result; with `refused`, the message of the error of that name. Anything else raises SoakError."""
        asked = next(self._ids)
        frame = {"jsonrpc": "2.0", "id": asked, "method": method, "params": params or {}}
        self._writer.write(json.dumps(frame).encode() + b"\n")
        await self._writer.drain()
        answer = await self._answer(asked, method)
        error = answer.get("error")
        name = error["data"]["name"] if error else None
        if name != refused:
            kind = Forgotten if name == "plan_not_found" else SoakError
            raise kind(f"{method} was answered with {error or 'a result'}, expected was {refused or 'a result'}")
        if error:
            return error["message"]
        self._check_generation(method, answer["result"])
        return answer["result"]

    async def _answer(self, asked: int, method: str) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_S):
            while True:
                line = await self._reader.readline()
                if not line.endswith(b"\n"):
                    raise SoakError(f"{method} got no answer: the daemon closed the connection")
                answer: dict[str, Any] = json.loads(line)
                if answer.get("id") == asked:
                    return answer
                if answer.get("method") != "notice":
                    raise SoakError(f"{method} was answered with {line[:200]!r}")
                self.notices += 1

    def _check_generation(self, method: str, result: dict[str, Any]) -> None:
        """One client never sees an older world after a newer one; a remembered plan's explanation has none."""
        seen = result.get("generation")
        if seen is None:
            return
        if seen < self.generation:
            raise SoakError(f"{method} came from generation {seen} after {self.generation}")
        self.generation = seen

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Load:
    """Jobs against the daemon at `path`. `seed` makes two runs ask the same questions in each client."""

    def __init__(self, path: Path, model: dict[str, Any] | None = None, seed: int = 20) -> None:
        self.path = path
        self.tally = Tally()
        self.model = model or MODEL
        self.calls: tuple[str, ...] = ()
        self._seed = seed
        self._lines: list[Line] = []

    async def begin(self) -> None:
        """Learn what the daemon can do; have the model traced, so that the load starts warm."""
        line = await Line.open(self.path)
        self.calls = tuple((await line.call("hello"))["capabilities"])
        await line.call("plan", self._question(4096))
        await line.close()

    async def end(self) -> None:
        """Hang up everywhere."""
        for line in self._lines:
            await line.close()

    async def jobs(self) -> list[Job]:
        """Those of the fifty clients, connected, and the broken ones."""
        pace = ASKERS / CALLS_A_SECOND
        askers = [Job("calls", await self._asker(n), pace) for n in range(ASKERS)]
        watchers = [Job("calls of subscribers", await self._watcher(), 3.0) for _ in range(WATCHERS)]
        comers = [Job("calls on a new connection", self._comer(n), 1.0) for n in range(COMERS)]
        return [*askers, *watchers, *comers, *(Job(*one) for one in soak_abuse.jobs(self.path))]

    def _question(self, context: int) -> dict[str, Any]:
        return {"model": self.model, "hardware": HARDWARE, "workload": {"context_length": context}}

    async def _asker(self, number: int) -> Callable[[int], Awaitable[None]]:
        line = await Line.open(self.path)
        self._lines.append(line)
        dice = random.Random(self._seed * 1000 + number)  # noqa: S311 -- a load, not a secret
        kinds = [kind for kind in _MIX if kind != "metrics" or "metrics" in self.calls]
        weights = [_MIX[kind] for kind in kinds]

        async def work(_: int) -> None:
            (kind,) = dice.choices(kinds, weights)
            self.tally.counts[f"asked {kind}"] += 1
            await getattr(self, f"_ask_{kind}")(line, dice)

        return work

    async def _watcher(self) -> Callable[[int], Awaitable[None]]:
        line = await Line.open(self.path)
        self._lines.append(line)
        await line.call("subscribe")

        async def work(_: int) -> None:
            before = line.notices
            await line.call("ping")
            self.tally.counts["notices"] += line.notices - before

        return work

    def _comer(self, number: int) -> Callable[[int], Awaitable[None]]:
        dice = random.Random(self._seed * 1000 + 500 + number)  # noqa: S311 -- a load, not a secret

        async def work(_: int) -> None:
            line = await Line.open(self.path)
            try:
                await self._ask_old_plan(line, dice)
            finally:
                await line.close()

        return work

    async def new_model(self, number: int) -> None:
        """A model nobody asked about before: the daemon starts a worker that traces it."""
        config = {**self.model["config"], "vocab_size": self.model["config"]["vocab_size"] + 1 + number}
        line = await Line.open(self.path)
        try:
            await line.call("plan", {**self._question(4096), "model": {"config": config}})
        finally:
            await line.close()

    async def _plan(self, line: Line, context: int) -> dict[str, Any]:
        plan: dict[str, Any] = await line.call("plan", self._question(context))
        if plan["workload"]["context_length"] != context or plan["source"] != "daemon" or not plan["chosen"]:
            raise SoakError(f"a wrong answer for {context} tokens: {plan['decision']} from {plan['source']}")
        return plan

    async def _ask_ping(self, line: Line, _: random.Random) -> None:
        await line.call("ping")

    async def _ask_hello(self, line: Line, _: random.Random) -> None:
        await line.call("hello", {"client": "soak", "protocol": [1]})

    async def _ask_old_plan(self, line: Line, dice: random.Random) -> None:
        await self._plan(line, 1024 * dice.randint(1, 8))

    async def _ask_new_plan(self, line: Line, dice: random.Random) -> None:
        await self._plan(line, dice.randint(1, 40_000))

    async def _ask_explained(self, line: Line, dice: random.Random) -> None:
        """Some hundred plans are remembered, two seconds of this load: on a busy machine it may take a second try."""
        for _ in range(_TRIES):
            plan = await self._plan(line, dice.randint(1, 40_000))
            with contextlib.suppress(Forgotten):
                explained = await line.call("explain", {"plan_id": plan["plan_id"]})
                if not explained["lines"]:
                    raise SoakError("an explanation without a line")
                return
            self.tally.counts["plans forgotten before they were explained"] += 1
        raise SoakError("no plan was remembered for long enough to be explained")

    async def _ask_fit(self, line: Line, dice: random.Random) -> None:
        params = {"model": self.model, "hardware": HARDWARE, "memory_budget_bytes": 2**28 * dice.randint(1, 16)}
        await line.call("fit", params)

    async def _ask_methods(self, line: Line, _: random.Random) -> None:
        await line.call("methods")

    async def _ask_records(self, line: Line, dice: random.Random) -> None:
        await line.call("records", {"limit": dice.randint(1, 50)})

    async def _ask_hardware(self, line: Line, _: random.Random) -> None:
        await line.call("hardware")

    async def _ask_status(self, line: Line, _: random.Random) -> None:
        await line.call("status")

    async def _ask_metrics(self, line: Line, _: random.Random) -> None:
        await line.call("metrics")

    async def _ask_wrong(self, line: Line, dice: random.Random) -> None:
        wrong = {"workload": {"context_length": -dice.randint(1, 9)}, "model": {"id": "org/name"}}
        await line.call("plan", wrong, refused="invalid_params")

    async def _ask_unknown_plan(self, line: Line, _: random.Random) -> None:
        await line.call("explain", {"plan_id": "nobody's"}, refused="plan_not_found")


async def keep(job: Job, tally: Tally, over: asyncio.Event, dice: random.Random) -> None:
    """Repeat a job at its pace, unevenly as people do, until it is over; a round that fails is noted."""
    for number in itertools.count():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), dice.uniform(0, 2) * job.pause_s)
        if over.is_set():
            return
        await one_round(job, tally, number)


async def one_round(job: Job, tally: Tally, number: int) -> None:
    """One round of a job, counted."""
    try:
        await job.work(number)
    except (SoakError, OSError, TimeoutError, ValueError, KeyError, AssertionError) as error:
        tally.wrong(f"{job.name}, round {number}: {type(error).__name__}: {error}")
    tally.counts[job.name] += 1

"""`plan`, `fit` and `explain`: from params to an encoded result, without ever blocking the event loop.

Read the model's files and any cached profile in a thread; on a miss await a trace; then plan. The world may change
while a trace runs: the answer comes from the world that is current when it is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from veloxquant import local
from veloxquant.daemon.answer_cache import Answer, Answers, Plans, Sight, look, pack
from veloxquant.daemon.threads import THREAD_PREFIX
from veloxquant.daemon.traces import KEEP_S
from veloxquant.errors import InvalidParams, Overloaded
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import fit
from veloxquant.planner.plan import plan
from veloxquant.planner.result import Plan
from veloxquant.wire.answers import Explanation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.daemon.state import State
    from veloxquant.daemon.traces import Traces
    from veloxquant.local import World
    from veloxquant.models.resolve import ModelSource
    from veloxquant.planner.request import PlanRequest
    from veloxquant.wire.messages import ExplainParams, FitParams, PlanParams

_THREADS = {"plan": 4, "fit": 1}
"""A table of what fits can take fifty times as long as a plan: plans wait for no thread that makes one, and share the
interpreter with one table at a time."""
_WAITING = 1024
"""Questions in threads or waiting for one, beyond which more are refused."""
_ATTEMPTS = 3

_Key = tuple[int, str, bytes]
"""Generation, method and params of a question."""


class _Made(NamedTuple):
    """A result as it is sent, and as it is kept."""

    encoded: bytes
    answer: Answer
    plan_id: str | None


class Questions:
    """Answers questions about models; remembers what it answered."""

    def __init__(self, state: State, traces: Traces) -> None:
        self.answers = Answers()
        self._plans = Plans()
        self._state = state
        self._traces = traces
        self._threads = {
            method: ThreadPoolExecutor(count, thread_name_prefix=THREAD_PREFIX) for method, count in _THREADS.items()
        }
        self._open = 0
        self._being_answered: dict[_Key, asyncio.Event] = {}

    def remembered(self, method: str, raw: bytes) -> bytes | None:
        """The result of the same question in the same world, None when it was not asked yet."""
        return self.answers.get(self._state.era, method, raw)

    async def answer(self, method: str, params: PlanParams | FitParams, raw: bytes) -> msgspec.Raw:
        """The result, encoded. Raises what `local.plan` raises, and Overloaded."""
        _check_path(params)
        loop = asyncio.get_running_loop()
        for _ in range(_ATTEMPTS):
            if (told := await self._from_another(method, raw)) is not None:
                return msgspec.Raw(told)
            world = self._state.world
            with self._open_question((world.snapshot.generation, method, raw)):
                source, made = await loop.run_in_executor(self._threads[method], self._try, method, params, world)
                if made is not None:
                    self._remember(method, raw, made)
                    return msgspec.Raw(made.encoded)
            await self._traces.profile(source, world)
        raise Overloaded("the methods changed each time the model was traced", hint="ask again")

    async def explain(self, params: ExplainParams) -> Explanation:
        """Sentences about a remembered plan, or about a plan made now. Raises PlanNotFound, MethodNotFound."""
        if params.plan_id is None:
            question = params.plan_params()
            raw = msgspec.json.encode(question)
            encoded = self.remembered("plan", raw) or bytes(await self.answer("plan", question, raw))
        else:
            encoded = self._plans.get(params.plan_id)
        made = msgspec.json.decode(encoded, type=Plan)
        return Explanation(plan_id=made.plan_id, label=params.label, lines=explain(made, params.label))

    def close(self) -> None:
        """Start nothing more; do not wait."""
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def _from_another(self, method: str, raw: bytes) -> bytes | None:
        """What the same question of another client gave, which is being answered; None when there is none, or nothing.

        When the world moves under many clients with one question, one of them has it answered, not each. An answer
        about files that changed after it was begun does not count (the memory of answers looks).
        """
        answered = self._being_answered.get((self._state.generation, method, raw))
        if answered is None:
            return None
        await answered.wait()
        return self.remembered(method, raw)

    @contextlib.contextmanager
    def _open_question(self, key: _Key) -> Iterator[None]:
        """Have others with the same question wait until this one is answered, refused or given up."""
        if self._open >= _WAITING:
            raise Overloaded(f"{self._open} questions are open", hint="ask again in a moment")
        self._open += 1
        answered = self._being_answered.setdefault(key, asyncio.Event())
        try:
            yield
        finally:
            self._open -= 1
            self._being_answered.pop(key, None)
            answered.set()

    def _remember(self, method: str, raw: bytes, made: _Made) -> None:
        self.answers.put(self._state.era, method, raw, made.answer)
        if made.plan_id is not None:
            self._plans.put(made.plan_id, made.answer.result)

    def _try(self, method: str, params: PlanParams | FitParams, world: World) -> tuple[ModelSource, _Made | None]:
        """In a thread: find the model; the result, None when the model has to be traced first."""
        source = local.model_source(params)
        files = look(params.model.path or source.path)
        if files:
            # Read again after the look, so that no change can fall between the two and be missed for ever.
            source = local.model_source(params)
        profile = self._traces.known(source, world)
        if profile is None:
            return source, None
        return source, self._encode(method, local.request(params, profile, world), files, world)

    def _encode(self, method: str, request: PlanRequest, files: Sight, world: World) -> _Made:
        found = fit(request, world.snapshot) if method == "fit" else plan(request, world.snapshot)
        encoded = msgspec.json.encode(found)
        until = time.monotonic() + KEEP_S
        answer = Answer(pack(encoded), files, found.generation, request.elsewhere, until)
        return _Made(encoded, answer, found.plan_id if isinstance(found, Plan) else None)


def _check_path(params: PlanParams | FitParams) -> None:
    """The daemon's current folder is not the client's."""
    path = params.model.path
    if path is not None and not Path(path).is_absolute():
        raise InvalidParams(
            f"model.path is {path!r}, which is not absolute", hint="give the whole path", field="model.path"
        )

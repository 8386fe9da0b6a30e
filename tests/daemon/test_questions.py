"""Many clients with one question have it answered once; whatever becomes of the first, the others are answered."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.daemon.answer_cache import Answer, Answers, Plans, look, pack
from veloxquant.daemon.questions import Questions, _Made
from veloxquant.daemon.state import Era
from veloxquant.errors import ModelNotFound, Overloaded
from veloxquant.wire.messages import ModelParams, PlanParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

PARAMS = PlanParams(model=ModelParams(id="org/name"))


class Counting(Questions):
    """Answers with how often it was asked; each answer waits for `gate`."""

    def __init__(self, folder: Path | None = None, trouble: Exception | None = None) -> None:
        world = SimpleNamespace(snapshot=SimpleNamespace(generation=3))
        state: Any = SimpleNamespace(generation=3, era=Era(3, 3), world=world)
        super().__init__(state, traces=None)  # type: ignore[arg-type]
        self.made = 0
        self.gate = threading.Event()
        self.begun = threading.Event()
        self._folder = None if folder is None else str(folder)
        self._trouble = trouble

    def _try(self, *_: Any) -> Any:
        self.made += 1
        files, number = look(self._folder), self.made
        self.begun.set()
        assert self.gate.wait(30)
        if self._trouble is not None:
            raise self._trouble
        encoded = b'{"made":%d}' % number
        return None, _Made(encoded, Answer(pack(encoded), files, 3), f"plan-{number}")


def crowd(
    questions: Callable[[], Counting], act: Callable[[Counting, list[asyncio.Task[Any]]], Awaitable[None]]
) -> Any:
    """200 clients ask the same while the first of them is being answered; then `act`, then what each got."""

    async def run() -> list[Any]:
        asked = questions()
        tasks = [asyncio.create_task(asked.answer("plan", PARAMS, b"{}"))]
        await asyncio.to_thread(asked.begun.wait, 30)
        tasks += [asyncio.create_task(asked.answer("plan", PARAMS, b"{}")) for _ in range(199)]
        await asyncio.sleep(0)
        await act(asked, tasks)
        asked.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert asked._open == 0
        assert asked._being_answered == {}
        asked.close()
        return [asked, *found]

    return asyncio.run(run())


def test_what_is_remembered_is_touched_by_the_loops_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts bytes, which two threads at once would miscount for good."""
    threads: list[threading.Thread] = []
    for kind in (Answers, Plans):
        put = kind.put
        monkeypatch.setattr(
            kind, "put", lambda *told, put=put: threads.append(threading.current_thread()) or put(*told)
        )
    asked, *_ = crowd(Counting, nothing)
    assert threads == [threading.main_thread()] * 2
    assert asked._plans.get("plan-1") == b'{"made":1}'


async def nothing(_: Counting, __: list[asyncio.Task[Any]]) -> None:
    """Let it go on."""


def test_r10_one_question_of_many_clients_is_answered_once() -> None:
    """Else each change of the world would cost as many plans as there are clients."""
    asked, *found = crowd(Counting, nothing)
    assert asked.made == 1
    assert {bytes(one) for one in found} == {b'{"made":1}'}


def test_r10_the_others_are_answered_when_the_first_client_goes() -> None:
    """Its task is cancelled with its connection."""

    async def leave(_: Counting, tasks: list[asyncio.Task[Any]]) -> None:
        tasks[0].cancel()

    _, first, *others = crowd(Counting, leave)
    assert isinstance(first, asyncio.CancelledError)
    assert all(bytes(one).startswith(b'{"made":') for one in others)


def test_r10_the_others_hear_a_refusal_of_their_own() -> None:
    """An error is not shared: it may have passed."""
    _, *found = crowd(lambda: Counting(trouble=ModelNotFound("gone")), nothing)
    assert {type(one) for one in found} == {ModelNotFound}


def test_an_answer_begun_before_a_file_changed_is_not_given_to_who_asks_after(short_folder: Path) -> None:
    """Who writes a model's config and then asks is answered about what was written."""
    config = short_folder / "config.json"
    config.write_text("{}")

    async def change(_: Counting, __: list[asyncio.Task[Any]]) -> None:
        config.write_text('{"longer": 1}')

    asked, first, *others = crowd(lambda: Counting(folder=short_folder), change)
    assert bytes(first) == b'{"made":1}'
    assert asked.made > 1
    assert b'{"made":1}' not in {bytes(one) for one in others}


def test_too_many_different_questions_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the error that says to ask again."""
    monkeypatch.setattr("veloxquant.daemon.questions._WAITING", 2)

    async def run() -> None:
        asked = Counting()
        tasks = [asyncio.create_task(asked.answer("plan", PARAMS, b"%d" % number)) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await asked.answer("plan", PARAMS, b"another")
        asked.gate.set()
        await asyncio.gather(*tasks)
        asked.close()

    asyncio.run(run())


class Tables(Counting):
    """Plans are answered at once; tables wait for the gate."""

    def _try(self, *asked: Any) -> Any:
        if asked[0] == "fit":
            return super()._try(*asked)
        return None, _Made(b"{}", Answer(pack(b"{}"), (), 3), "plan")


def test_a_plan_waits_for_no_table_however_many_there_are() -> None:
    """Sixteen tables that take long are asked for, each another one; a plan asked for then is answered before."""

    async def run() -> int:
        asked = Tables()
        tables = [asyncio.create_task(asked.answer("fit", PARAMS, b"%d" % number)) for number in range(16)]
        await asyncio.to_thread(asked.begun.wait, 30)
        await asked.answer("plan", PARAMS, b"{}")
        answered = sum(table.done() for table in tables)
        asked.gate.set()
        assert len(await asyncio.gather(*tables)) == asked.made == 16
        asked.close()
        return answered

    assert asyncio.run(run()) == 0

"""Notices: the full state first, then changes, merged, never faster than the gap, never to a client that stalls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.daemon.subscribers import Subscribers
from veloxquant.wire import messages
from veloxquant.wire.answers import Notice

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable


class Client:
    """A connection that keeps what it was sent."""

    def __init__(self) -> None:
        self.writable = True
        self.subscribed = False
        self.notices: list[Notice] = []

    def send(self, line: bytes) -> None:
        """Keep it."""
        params = messages.decode_answer(line[:-1]).params
        assert isinstance(params, msgspec.Raw)
        self.notices.append(messages.decode_result(params, Notice))


class Scene:
    """Subscribers of one client to a counter."""

    def __init__(self, gap_s: float) -> None:
        self.generation = 0
        self.subscribers = Subscribers(self.describe, gap_s)
        self.client: Any = Client()

    def describe(self, topics: Iterable[str]) -> tuple[int, dict[str, Any]]:
        """The counter under each topic."""
        return self.generation, dict.fromkeys(topics, self.generation)

    def change(self, *topics: str) -> None:
        """Something moved."""
        self.generation += 1
        self.subscribers.changed(frozenset(topics))

    async def notices(self, count: int) -> list[Notice]:
        """Wait for this many."""
        async with asyncio.timeout(10):
            while len(self.client.notices) < count:  # noqa: ASYNC110 -- the client is a plain list
                await asyncio.sleep(0.001)
        found: list[Notice] = self.client.notices
        return found


def play(scenario: Callable[[Scene], Awaitable[None]], gap_s: float = 0.05) -> None:
    """Run a scenario."""

    async def run() -> None:
        await scenario(Scene(gap_s))

    asyncio.run(run())


def test_the_full_state_comes_first_and_after_the_answer() -> None:
    """Not from inside the call."""

    async def scenario(scene: Scene) -> None:
        assert scene.subscribers.add(scene.client, ["records", "generation"]) == ("generation", "records")
        assert scene.client.notices == []
        assert scene.client.subscribed
        (first,) = await scene.notices(1)
        assert (first.event, first.full, first.topics) == ("state", True, ("generation", "records"))
        assert first.state == {"generation": 0, "records": 0}

    play(scenario)


def test_changes_are_merged_within_the_gap() -> None:
    """A burst of fifty is one or two notices, the last with the latest state."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["records", "hardware"])
        await scene.notices(1)
        for number in range(50):
            scene.change("records" if number % 2 else "hardware", "generation")
            await asyncio.sleep(0)
        await scene.notices(2)
        await asyncio.sleep(0.5)
        found = scene.client.notices
        assert len(found) < 5
        last = found[-1]
        assert (last.event, last.full, last.generation) == ("changed", False, 50)
        assert last.state == {"records": 50, "hardware": 50}

    play(scenario, gap_s=0.2)


def test_topics_nobody_asked_for_are_silent() -> None:
    """A subscriber hears of its own topics only."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["hardware"])
        await scene.notices(1)
        scene.change("records", "generation")
        await asyncio.sleep(0.1)
        assert len(scene.client.notices) == 1

    play(scenario)


def test_a_client_that_stalls_gets_the_merged_rest_later() -> None:
    """Nothing is buffered for it meanwhile."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["records"])
        await scene.notices(1)
        scene.client.writable = False
        for _ in range(5):
            scene.change("records")
            await asyncio.sleep(0.02)
        assert len(scene.client.notices) == 1
        scene.client.writable = True
        scene.subscribers.caught_up(scene.client)
        assert (await scene.notices(2))[-1].state == {"records": 5}

    play(scenario, gap_s=0.01)


def test_more_topics_can_be_added() -> None:
    """The full state of all of them comes again."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["records"])
        await scene.notices(1)
        assert scene.subscribers.add(scene.client, ["warnings"]) == ("records", "warnings")
        second = (await scene.notices(2))[1]
        assert (second.full, second.topics) == (True, ("records", "warnings"))
        assert len(scene.subscribers) == 1

    play(scenario)


def test_unsubscribing_ends_it() -> None:
    """From one topic, from all, and twice."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["records", "hardware"])
        assert scene.subscribers.remove(scene.client, ["records"]) == ("hardware",)
        scene.change("records")
        assert scene.subscribers.remove(scene.client) == ()
        assert scene.subscribers.remove(scene.client) == ()
        scene.subscribers.caught_up(scene.client)
        scene.change("hardware")
        await asyncio.sleep(0.05)
        assert (scene.client.notices, scene.client.subscribed, len(scene.subscribers)) == ([], False, 0)

    play(scenario, gap_s=0.01)


def test_goodbye_is_the_last_word() -> None:
    """Sent at once; nothing follows it."""

    async def scenario(scene: Scene) -> None:
        scene.subscribers.add(scene.client, ["records"])
        await scene.notices(1)
        scene.change("records")
        scene.subscribers.say_goodbye()
        await asyncio.sleep(0.05)
        assert [one.event for one in scene.client.notices][-1] == "stopping"

    play(scenario, gap_s=0.01)

"""Telling clients that the world changed: at once when it has been quiet, else merged, the latest state only.

A subscriber first gets the full state of its topics. After that it gets at most one notice in GAP_S, with what
changed since the last one. While a client does not read, nothing is sent to it; it gets the merged rest when it reads
again, and is closed like any stalled client when it does not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from veloxquant.wire.answers import Notice
from veloxquant.wire.messages import encode_notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from veloxquant.daemon.connection import Connection

GAP_S = 0.25


class Subscribers:
    """Who listens to what. `describe` gives the current state of the topics it is asked for."""

    def __init__(
        self, describe: Callable[[Iterable[str]], tuple[int, Mapping[str, Any]]], gap_s: float = GAP_S
    ) -> None:
        self._describe = describe
        self._gap_s = gap_s
        self._all: dict[Connection, _Subscription] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, client: Connection, topics: Iterable[str]) -> tuple[str, ...]:
        """Listen to these topics as well; the full state of all of them follows. The topics now listened to."""
        subscription = self._all.get(client)
        if subscription is None:
            subscription = self._all[client] = _Subscription(client, self._describe, self._gap_s)
        client.subscribed = True
        subscription.start(topics)
        return tuple(sorted(subscription.topics))

    def remove(self, client: Connection, topics: Iterable[str] | None = None) -> tuple[str, ...]:
        """Listen no more to these topics (None: to any). The topics still listened to."""
        subscription = self._all.get(client)
        if subscription is None:
            return ()
        subscription.topics -= subscription.topics if topics is None else set(topics)
        if not subscription.topics:
            subscription.stop()
            client.subscribed = False
            del self._all[client]
        return tuple(sorted(subscription.topics))

    def changed(self, topics: frozenset[str]) -> None:
        """Tell, now or soon, whoever listens to one of these topics."""
        for subscription in self._all.values():
            subscription.mark(topics)

    def caught_up(self, client: Connection) -> None:
        """The client reads again."""
        subscription = self._all.get(client)
        if subscription is not None:
            subscription.mark(frozenset())

    def say_goodbye(self) -> None:
        """The daemon stops: a last notice, then silence."""
        generation, _ = self._describe(())
        for client in list(self._all):
            client.send(encode_notice("notice", Notice(event="stopping", generation=generation)))
            self.remove(client)


class _Subscription:
    """One client's topics, what of them it has not been told yet, and when it may be told."""

    def __init__(
        self, client: Connection, describe: Callable[[Iterable[str]], tuple[int, Mapping[str, Any]]], gap_s: float
    ) -> None:
        self.topics: set[str] = set()
        self._client = client
        self._describe = describe
        self._gap_s = gap_s
        self._untold: set[str] = set()
        self._full = False
        self._loop = asyncio.get_running_loop()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, topics: Iterable[str]) -> None:
        """The full state is due, after the answer to the call that asked for it."""
        self.topics |= set(topics)
        self._untold |= self.topics
        self._full = True
        self._schedule(self._loop.time())

    def stop(self) -> None:
        """Nothing more is due."""
        if self._timer is not None:
            self._timer.cancel()

    def mark(self, topics: frozenset[str]) -> None:
        """These topics changed."""
        self._untold |= topics & self.topics
        if self._untold:
            self._schedule(max(self._next_at, self._loop.time()))

    def _schedule(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tell)

    def _tell(self) -> None:
        self._timer = None
        if not self._client.writable or not self._untold:
            return
        topics = sorted(self._untold)
        generation, state = self._describe(topics)
        event = "state" if self._full else "changed"
        notice = Notice(event=event, generation=generation, full=self._full, topics=tuple(topics), state=state)
        self._untold.clear()
        self._full = False
        self._next_at = self._loop.time() + self._gap_s
        self._client.send(encode_notice("notice", notice))

"""What happened since the start: counts by call and by error, and how long answers took, lately and in all."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from typing import TYPE_CHECKING

from veloxquant.wire.answers import ClientsState, RequestsState

if TYPE_CHECKING:
    from veloxquant.daemon.connection import Connection

KEPT = 4096
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram's buckets. Fixed: a scraper adds them up over restarts and machines."""


class Clients(set["Connection"]):
    """The open connections, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.refused = 0
        self.nobody = asyncio.Event()
        """Set while there is no client."""
        self.nobody.set()

    def welcome(self, client: Connection) -> None:
        """One more."""
        self.add(client)
        self.nobody.clear()
        self.peak = max(self.peak, len(self))

    def leave(self, client: Connection) -> None:
        """One less."""
        self.discard(client)
        if not self:
            self.nobody.set()

    def state(self, subscribed: int) -> ClientsState:
        """For `status`."""
        return ClientsState(now=len(self), peak=self.peak, subscribed=subscribed, refused=self.refused)


class Durations:
    """How long the requests of one method took: how many ended within each of BOUNDS_S but not the one before."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """The last one counts those beyond every bound."""
        self.total_s = 0.0


class Counters:
    """Counts of requests. Single times are kept for the last KEPT of them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.slow = 0
        """Requests above daemon.slow_call_ms."""
        self.durations: dict[str, Durations] = {}
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def answered(self, method: str, seconds: float) -> None:
        """One request of this method took this long from frame to answer."""
        self.calls[method] += 1
        self._seconds.append(seconds)
        durations = self.durations.get(method)
        if durations is None:
            durations = self.durations[method] = Durations()
        durations.counts[bisect_left(BOUNDS_S, seconds)] += 1
        durations.total_s += seconds

    def state(self) -> RequestsState:
        """For `status`."""
        times = sorted(self._seconds)
        return RequestsState(
            total=self.calls.total(),
            by_method=dict(self.calls),
            errors=dict(self.errors),
            slow=self.slow,
            p50_ms=_quantile_ms(times, 0.50),
            p99_ms=_quantile_ms(times, 0.99),
        )


def _quantile_ms(times: list[float], share: float) -> float | None:
    """The time that this share of requests stayed within, in ms (the nearest rank)."""
    if not times:
        return None
    return round(times[min(len(times) - 1, int(share * len(times)))] * 1000, 4)

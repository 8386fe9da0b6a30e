"""When a watcher looks and calls: pure bookkeeping of moments on a monotonic clock, in seconds."""

from __future__ import annotations

SETTLE_S = 0.05
"""From the first event to the first call: a rename and its neighbours make one call, not five."""
BURST_INTERVAL_S = 0.25
REST_MULTIPLE = 4.0
"""A call that took long is followed by this much rest, so that a burst costs a fifth of one core at most."""
QUIET_S = 2.0
"""A last call this long after the last event, for what a full queue dropped and for clocks that tick in 2 s (FAT)."""
BURST_EVENTS = 100
"""So many events between two calls are a burst: some thirty records, whose events pass through three threads each."""
POLL_S = 0.1
BURST_S = 30.0
"""After so long in a burst events are tried again: a slow stream would never let it end, and is heard of sooner so."""

_NEVER = float("inf")


class Schedule:
    """The next moments to stat the folders and to call back."""

    def __init__(self, now: float, stat_interval_s: float, forced_interval_s: float, quiet_s: float) -> None:
        self._stat_interval_s = stat_interval_s
        self._forced_interval_s = forced_interval_s
        self._quiet_s = quiet_s
        self._stat_at = now + stat_interval_s
        self._forced_at = now + forced_interval_s
        self._call_at = _NEVER
        self._quiet_at = _NEVER
        self._rested_at = now
        self._heard = 0
        self._poll_at = _NEVER
        self._calm_at = self._burst_ends_at = _NEVER

    @property
    def next_at(self) -> float:
        """When something is to be done if nothing happens before."""
        return min(self._stat_at, self._forced_at, self._call_at, self._quiet_at, self._poll_at)

    @property
    def is_burst(self) -> bool:
        """Whether so much happens that a stat of the folders, ten times a second, tells of it for less than events."""
        return self._poll_at != _NEVER

    def event(self, now: float) -> None:
        """Something may have changed."""
        self._heard += 1
        self._call_at = min(self._call_at, max(now + SETTLE_S, self._rested_at))
        self._quiet_at = now + self._quiet_s

    def take_stat(self, now: float) -> bool:
        """Whether the folders are to be looked at now."""
        due = now >= self._stat_at
        if due:
            self._stat_at = now + self._stat_interval_s
        return due

    def take_call(self, now: float) -> bool:
        """Whether to call back now: after an event, when a burst has become quiet, or because it is time anyway."""
        due = now >= min(self._call_at, self._quiet_at, self._forced_at)
        if now >= self._call_at:
            self._call_at = _NEVER
        if now >= self._quiet_at:
            self._quiet_at = _NEVER
        if now >= self._forced_at:
            self._forced_at = now + self._forced_interval_s
        if due:
            if self._heard >= BURST_EVENTS:
                self._poll_at, self._calm_at = now + POLL_S, now + self._quiet_s
                self._burst_ends_at = now + BURST_S
            self._heard = 0
        return due

    def polled(self, now: float, *, changed: bool) -> None:
        """The folders were looked at. A burst ends, with a call, once they stayed as they were for the quiet time.

        Or once it lasted for long.
        """
        if not self.is_burst:
            return
        if changed:
            self._calm_at = now + self._quiet_s
        if now >= min(self._calm_at, self._burst_ends_at):
            self._poll_at = self._calm_at = _NEVER
            self.event(now)
        elif now >= self._poll_at:
            self._poll_at = now + POLL_S

    def called(self, began: float, ended: float) -> None:
        """A call has returned; the next one waits."""
        self._rested_at = ended + max(BURST_INTERVAL_S, REST_MULTIPLE * (ended - began))

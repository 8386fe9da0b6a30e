"""What happened update by update, for plots: bounded, and without losing a peak or a millisecond."""

from __future__ import annotations

from typing import NamedTuple

MOST_POINTS = 4096
"""A layer never keeps more: 128,000 generated tokens are as easy to plot as 4,000."""


class TimelinePoint(NamedTuple):
    """One update, or several neighbours merged into one once a timeline is long."""

    sequence_tokens: int
    """Tokens of the sequence after the update; after the last one of merged updates."""
    resident_bytes: int
    """Bytes of the cache's arrays after the update; the largest of merged updates."""
    ms: float
    """Time of the update in ms; the sum of merged updates."""
    calls: int
    """How many updates this point stands for."""

    def merged(self, later: TimelinePoint) -> TimelinePoint:
        """This point and the next one as one."""
        return TimelinePoint(
            later.sequence_tokens,
            max(self.resident_bytes, later.resident_bytes),
            self.ms + later.ms,
            self.calls + later.calls,
        )


class Timeline:
    """Points in order.

    When there are too many, neighbours are merged two by two and each new point takes twice as many updates; the sums
    of ms and calls, and the largest resident bytes, stay what they were.
    """

    def __init__(self) -> None:
        self._points: list[TimelinePoint] = []
        self._stride = 1

    def add(self, point: TimelinePoint) -> None:
        """One more update. A point of 0 calls (values that follow their keys) belongs to the update before it."""
        last = self._points[-1] if self._points else None
        if last is not None and (last.calls + point.calls <= self._stride or not last.calls):
            self._points[-1] = last.merged(point)
            return
        if len(self._points) == MOST_POINTS:
            self._halve()
            self.add(point)
            return
        self._points.append(point)

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = [first.merged(second) for first, second in pairs]
        self._stride *= 2

    def points(self) -> tuple[TimelinePoint, ...]:
        """All points, oldest first."""
        return tuple(self._points)

    def copy(self) -> Timeline:
        """Another timeline with the same points; what is added to one is not added to the other."""
        other = Timeline()
        other._points, other._stride = list(self._points), self._stride
        return other

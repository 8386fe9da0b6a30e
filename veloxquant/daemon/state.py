"""The one world that answers come from, and how it changes.

A world is frozen. A change builds the next one with a generation one higher and swaps it in by a single assignment,
so that an answer always comes from one consistent world and the request path takes no lock. All changes are made on
the event loop's thread; what takes time is computed elsewhere first.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.daemon import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.local import World
    from veloxquant.planner.snapshot import Records
    from veloxquant.profiles import Calibration, HardwareProfile

MATERIAL = 0.01
"""Memory has moved when it moved by this share of the total: smaller steps change no decision worth a new answer."""
_VOLATILE = ("active_bytes", "available_bytes")


class Era(NamedTuple):
    """The generations of answers that hold now: those about this machine, and those about another one."""

    here: int
    elsewhere: int


class State:
    """The current world, its warnings, and who wants to hear of changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.warnings: dict[str, str] = {}
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    @property
    def generation(self) -> int:
        """Counts changes; two answers of one generation come from the same world."""
        return self.world.snapshot.generation

    @property
    def era(self) -> Era:
        """Which answers are of the current world."""
        return Era(self.world.snapshot.generation, self.world.snapshot.settled_generation)

    def on_change(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Have `listener` called with the topics of each change."""
        self._listeners.append(listener)

    def warn(self, source: str, text: str | None) -> None:
        """Set or clear the warning of one source; listeners hear when it is another one."""
        if self.warnings.get(source) == text:
            return
        if text is None:
            del self.warnings[source]
        else:
            self.warnings[source] = text
        self._tell("warnings")

    def use_records(self, records: Records) -> None:
        """Plan with these records from now on."""
        if records is not self.world.snapshot.records:
            self._swap(self.world, ("records",), records=records)

    def use_calibrations(self, calibrations: Mapping[tuple[str, str], Calibration]) -> None:
        """Plan with these calibrations from now on."""
        if calibrations != self.world.snapshot.calibrations:
            self._swap(self.world, (), calibrations=calibrations)

    def use_hardware(self, hardware: HardwareProfile) -> bool:
        """Plan with this machine from now on, when it differs in more than a little memory; whether it does."""
        if not moved(self.world.snapshot.hardware, hardware):
            return False
        before = self.world.snapshot
        memory_alone = _without_memory(before.hardware) == _without_memory(hardware)
        settled = {"settled_generation": before.settled_generation} if memory_alone else {}
        self._swap(self.world, ("hardware",), hardware=hardware, **settled)
        return True

    def use_world(self, world: World) -> bool:
        """Answer from what a reload found, where it differs from what there was; whether it does.

        Else the world stays as it is, with its generation, so that what was answered stays remembered.
        """
        topics = _differing(self.world, world)
        calibrated = world.snapshot.calibrations != self.world.snapshot.calibrations
        if not topics and not calibrated and world.config == self.world.config:
            return False
        self._swap(world, topics)
        return True

    def _swap(self, world: World, topics: tuple[str, ...], **changes: Any) -> None:
        generation = self.generation + 1
        changes = {"generation": generation, "settled_generation": generation} | changes
        snapshot = dataclasses.replace(world.snapshot, **changes)
        self.world = dataclasses.replace(world, snapshot=snapshot)
        # Memory moves all day long where somebody asks: nothing that a log should fill with.
        severity = logging.DEBUG if topics == ("hardware",) else logging.INFO
        log.event("world.changed", severity, generation=generation, topics=list(topics))
        self._tell("generation", *topics)

    def _tell(self, *topics: str) -> None:
        for listener in self._listeners:
            listener(frozenset(topics))


def _differing(before: World, after: World) -> tuple[str, ...]:
    """The topics on which two worlds differ."""
    found = {
        "records": before.snapshot.records is not after.snapshot.records,
        "methods": _methods(before) != _methods(after),
        "hardware": moved(before.snapshot.hardware, after.snapshot.hardware),
    }
    return tuple(topic for topic, differs in found.items() if differs)


def _methods(world: World) -> tuple[Any, ...]:
    """What is disabled counts, too."""
    return world.loaded.facts(), world.snapshot.quarantined


def moved(before: HardwareProfile, after: HardwareProfile) -> bool:
    """Whether anything but memory differs, or memory by more than MATERIAL of the total (unknown total: at all)."""
    if _settled(before) != _settled(after):
        return True
    slack = MATERIAL * (after.total_memory_bytes or 0)
    return any(_differs(getattr(before, name), getattr(after, name), slack) for name in _VOLATILE)


def _differs(before: int | None, after: int | None, slack: float) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(before - after) > slack


def _settled(profile: HardwareProfile) -> Mapping[str, Any]:
    """What does not move by itself; where a figure came from is no figure."""
    skipped = (*_VOLATILE, "sources")
    return {name: getattr(profile, name) for name in profile.__struct_fields__ if name not in skipped}


def _without_memory(profile: HardwareProfile) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """All that an answer about another machine may show of this one."""
    return _settled(profile), {name: text for name, text in profile.sources.items() if name not in _VOLATILE}

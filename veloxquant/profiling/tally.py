"""The running counts of one wrapper."""

from __future__ import annotations

import dataclasses
from typing import Any

from veloxquant.profiling.measures import Sight, look
from veloxquant.profiling.report import LayerProfile
from veloxquant.profiling.timeline import Timeline, TimelinePoint


class Tally:
    """Counts, sizes and times of one cache since its making or its last reset. Holds no array and no cache."""

    def __init__(self, cache: Any, profile: LayerProfile, claims: tuple[str, ...]) -> None:
        self.claims = claims
        self.batch: LayerProfile | None = None
        self._begin(profile, look(cache, claims))

    def _begin(self, profile: LayerProfile, sight: Sight) -> None:
        self.profile = profile
        self.timeline = Timeline()
        self.profile.tokens_before = sight.sequence_tokens
        self._note(sight)

    def reset(self, cache: Any) -> None:
        """Everything from zero, for the same layer."""
        self.batch = None
        fresh = LayerProfile(self.profile.layer_id, is_fused=self.profile.is_fused)
        self._begin(fresh, look(cache, self.claims))

    def after_call(self, cache: Any) -> Sight:
        """Look at the cache after a call; peaks grow, also the claimed one."""
        sight = self.look(cache)
        if sight.reported_bytes is not None:
            self.profile.peak_memory_bytes = max(self.profile.peak_memory_bytes, sight.reported_bytes)
        return sight

    def look(self, cache: Any) -> Sight:
        """Look at the cache; of the peaks only the resident one grows."""
        sight = look(cache, self.claims)
        self._note(sight)
        return sight

    def _note(self, sight: Sight) -> None:
        profile = self.profile
        profile.resident_bytes, profile.reported_bytes, profile.sequence_tokens = sight
        profile.peak_resident_bytes = max(profile.peak_resident_bytes, sight.resident_bytes)

    def update(self, sight: Sight, ms: float, calls: int) -> None:
        """One more update in the timeline."""
        self.timeline.add(TimelinePoint(sight.sequence_tokens, sight.resident_bytes, ms, calls))

    def snapshot(self) -> LayerProfile:
        """A profile that does not change any more."""
        return dataclasses.replace(self.profile, timeline=self.timeline.points())

    def copy(self) -> Tally:
        """The same counts, which from now on go their own way."""
        other = object.__new__(Tally)
        other.claims, other.timeline, other.batch = self.claims, self.timeline.copy(), self.batch
        other.profile = dataclasses.replace(self.profile)
        return other

"""One variant under one setting: can it run, does it fit, and at which prefill step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import MethodError
from veloxquant.planner import speed as speeds
from veloxquant.planner.evidence import measured_memory, memory_evidence
from veloxquant.planner.largest import largest_context
from veloxquant.planner.layout import Refusal, lay_out
from veloxquant.planner.memory import bytes_per_token, shape_of, with_sequences
from veloxquant.planner.quality import broken_family
from veloxquant.planner.rejection import rejected
from veloxquant.planner.sizing import choose_step
from veloxquant.planner.throughput import served
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.planner.evidence import Sighting, Sightings
    from veloxquant.planner.layout import Layout
    from veloxquant.planner.memory import Measured, Shape
    from veloxquant.planner.result import Evidence, Quality, Rejected, Speed
    from veloxquant.planner.setting import Setting
    from veloxquant.planner.sizing import Sizing
    from veloxquant.planner.snapshot import Offer
    from veloxquant.planner.speed import Decode, Roofline
    from veloxquant.planner.throughput import Served


@dataclass(frozen=True)
class Option:
    """A variant that can run on this model, sized; whether it fits is for `sizing` to say."""

    setting: Setting
    offer: Offer
    layout: Layout
    shape: Shape
    seen: Sightings
    measured: Measured | None
    measured_by: tuple[Sighting, ...]
    sizing: Sizing

    @property
    def label(self) -> str:
        """The variant's label."""
        return self.offer.variant.label

    @property
    def engine_own(self) -> bool:
        """Nothing is replaced."""
        return self.offer.method.name == ENGINE_OWN

    @property
    def roomy(self) -> bool:
        """A tenth of the working set stays free."""
        return self.sizing.footprint.peak <= self.setting.room.roomy_bytes

    @cached_property
    def memory_evidence(self) -> Evidence:
        """What the bytes rest on: the records that gave them, else the trace or the method's own word."""
        return memory_evidence(self)

    @cached_property
    def quality(self) -> Quality:
        """Mean KL with its grounds."""
        return self.setting.quality(self.offer)

    @cached_property
    def line(self) -> Roofline:
        """The variant's roofline."""
        if self.engine_own:
            return self.setting.baseline_line
        return self.setting.baseline_line._replace(shape=self.shape)

    @cached_property
    def decode(self) -> Decode | None:
        """Decode as asked, None when unknown."""
        return self.decode_of(self.setting.workload.num_concurrent_requests)

    @cached_property
    def slowdown(self) -> float:
        """Decode time of a request alone by the engine's own cache's; 1 where either is unknown.

        Alone, since requests that wait for each other are no slower for what the cache is made of.
        """
        if self.engine_own:
            return 1.0
        setting, workload = self.setting, self.setting.workload
        if workload.num_concurrent_requests == 1:
            own, found = setting.baseline_decode, self.decode
        else:
            alone = msgspec.structs.replace(workload, num_concurrent_requests=1)
            own, found = setting.own_decode(alone), self.decode_of(1)
        return 1.0 if own is None or found is None else found.ms / own.ms

    def decode_of(self, requests: int) -> Decode | None:
        """Decode with another number of requests side by side."""
        setting, workload, own = self.setting, self.setting.workload, self.setting.baseline_decode
        if requests != workload.num_concurrent_requests:
            workload = msgspec.structs.replace(workload, num_concurrent_requests=requests)
            own = setting.own_decode(workload)
        if self.engine_own:
            return own
        own_ms = own.ms if own is not None else None
        return speeds.decode(self.line, workload, setting.hardware, self.seen.usable, own_ms)

    @cached_property
    def speed(self) -> Speed:
        """Decode and prefill with their grounds."""
        s = self.setting
        if self.engine_own:
            return s.baseline_speed
        prefill = s.baseline_speed.prefill_tok_s
        return speeds.speed(self.decode, prefill=prefill, model=s.model, workload=s.workload, hardware=s.hardware)

    @cached_property
    def served(self) -> Served:
        """Tokens a second over all slots that fit; looked at for the objective `throughput` alone."""
        return served(self)

    @cached_property
    def engine_settings(self) -> Mapping[str, Any] | None:
        """The method's own word for the stock engine's flags."""
        return self.offer.method.engine_settings(self.offer.variant)

    @cached_property
    def tokens_held(self) -> int | None:
        """Most tokens that a packed layer still holds of one sequence at the end; None where no token is dropped."""
        if not self.offer.method.drops_tokens:
            return None
        return max(term.read(self.setting.workload.tokens) for term in self.shape.terms if term.packed)

    @cached_property
    def largest_context(self) -> int:
        """Largest context at the asked slots; at least the asked one where that fits."""
        workload = self.setting.workload
        found = self.largest_context_of(workload.num_concurrent_requests)
        return found if self.sizing.short_by else max(found, workload.context_length)

    def largest_context_of(self, requests: int) -> int:
        """Largest context of each of so many requests, 0 for none.

        Where no token takes more bytes, memory sets no limit, and the model's own positions do.
        """
        workload, positions = self.setting.workload, self.setting.model.max_position
        generation = workload.generation_length
        held = with_sequences(self.shape, requests, workload.batch_size)
        found = largest_context(held, self.measured, self.setting.room, generation, workload.prefill_step_size)
        if positions is None or bytes_per_token(held, self.measured):
            return found
        return min(found, max(1, positions - generation))


def consider(setting: Setting, offer: Offer) -> Option | Rejected:
    """Size one variant, or say why it cannot be used on this model at all."""
    if not requested(setting, offer):
        return rejected(offer, "not_requested", "the request names other methods")
    if offer.method.drops_tokens and not setting.workload.allow_eviction:
        return rejected(offer, "drops_tokens", "it drops tokens, and the request does not allow eviction")
    layout = lay_out(setting.model, offer, setting.calibration)
    if isinstance(layout, Refusal):
        return rejected(offer, layout.reason, layout.detail)
    try:
        return _sized(setting, offer, layout)
    except MethodError as error:
        # A foreign method that breaks its contract answers with a typed refusal (methods.guard).
        return rejected(offer, "quarantined", error.message)


def _sized(setting: Setting, offer: Offer, layout: Layout) -> Option | Rejected:
    workload = setting.workload
    held = shape_of(setting.model, layout, offer, sequences=workload.sequences, batch=workload.batch_size)
    seen = setting.sightings(offer.variant.label)
    broken = broken_family(setting.model, held, seen.usable)
    if broken is not None:
        return rejected(offer, "family_rule", broken)
    found = measured_memory(seen.sizing, held, setting.baseline)
    measured, by = found if found is not None else (None, ())
    option = Option(setting, offer, layout, held, seen, measured, by, choose_step(setting, held, measured))
    _ask_the_method(option)
    return option


def _ask_the_method(option: Option) -> None:
    """Have the method say now, inside the fence of `consider`, what only it knows. Raises MethodError from it.

    The answers stay with the option, so that nothing asks the method again outside the fence.
    """
    for answer in ("quality", "speed", "engine_settings"):
        getattr(option, answer)


def requested(setting: Setting, offer: Offer) -> bool:
    """Whether the request leaves this variant in: by method name or by label."""
    names = setting.request.methods
    return names is None or offer.method.name in names or offer.variant.label in names

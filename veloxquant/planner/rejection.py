"""A variant that a plan does not use: the reason, by how much it missed, and the records that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.planner.evidence import cited
from veloxquant.planner.result import Rejected
from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.planner.option import Option
    from veloxquant.planner.result import Evidence, Reason
    from veloxquant.planner.snapshot import Offer


def rejected(
    offer: Offer, reason: Reason, detail: str, *, short_by: int | None = None, grounds: Evidence | None = None
) -> Rejected:
    """A variant that is not used; `grounds` are those of the figure that keeps it out."""
    return Rejected(
        method=offer.method.name,
        params=dict(sorted(offer.variant.params.items())),
        label=offer.variant.label,
        reason=reason,
        detail=detail,
        short_by_bytes=short_by,
        evidence=grounds,
    )


def too_large(option: Option) -> Rejected:
    """The rejection of a variant that does not fit."""
    room, sizing = option.setting.room, option.sizing
    size, grounds = sizing.footprint, option.memory_evidence
    by = f" by {cited(grounds)}" if grounds.record_ids else ""
    if sizing.short_of == "buffer_too_large":
        detail = (
            f"one buffer takes {format_size(size.largest_buffer)}{by}, the device allows "
            f"{format_size(room.max_buffer_bytes or 0)}"
        )
        return rejected(option.offer, "buffer_too_large", detail, short_by=sizing.short_by, grounds=grounds)
    detail = (
        f"caches take {format_size(size.peak)} at their peak ({format_size(size.stored)} stored){by}, "
        f"{format_size(max(0, room.kv_bytes))} are left for them; the largest context that fits is "
        f"{option.largest_context:,}"
    )
    return rejected(option.offer, "does_not_fit", detail, short_by=sizing.short_by, grounds=grounds)

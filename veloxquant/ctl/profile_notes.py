"""What a reader of a profile's figures must know to read them right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl.figures import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.ctl.profile_result import Profile
    from veloxquant.measure.measurement import Run


def notes(result: Profile) -> list[str]:
    """Sentences: those on one method, in the order they ran, then those on all."""
    return [*(note for one in result.found.runs for note in _on_method(one)), *_on_all(result)]


def _on_method(one: Run) -> Iterator[str]:
    if not one.same_when_profiled:
        yield f"{one.label} wrote another text when profiled: its caches do not give the same numbers twice"
    if one.reported_bytes not in (None, one.resident_bytes):
        yield f"{one.label} reports {one.reported_bytes:,} bytes and holds {one.resident_bytes:,}"
    if not one.allocator_agrees:
        yield (
            f"{one.label} holds {one.resident_bytes:,} bytes of arrays, and MLX's allocator gave out "
            f"{one.allocated_bytes:,}: {_why(one)}"
        )
    if one.text_tokens < one.generated_tokens:
        yield (
            f"{one.label} ended its text after {one.text_tokens:,} of {one.generated_tokens:,} tokens; it was fed on, "
            "so that all methods hold as many"
        )


def _why(one: Run) -> str:
    if one.allocated_bytes < one.resident_bytes:
        return "some arrays are views of others, or of arrays that were there before, and are counted twice"
    return (
        "views keep larger arrays alive, arrays lie where no attribute of a cache leads, or code keeps what it makes "
        "once a process"
    )


def _on_all(result: Profile) -> Iterator[str]:
    found = result.found
    asked = found.prompt_tokens + found.max_tokens
    if result.max_position is not None and asked > result.max_position:
        yield (
            f"{found.prompt_tokens:,} + {found.max_tokens:,} tokens are more than the {result.max_position:,} "
            "positions that the model was made for: what it writes beyond them may be no text"
        )
    if found.is_wide:
        yield (
            "this model computes in 32 bits: what fp16 held, and OF FP16 compares with, has 32 bits a number; records "
            f"compare with 16 bits a number, {size(found.fp16_cache_bytes)}"
        )
    if found.conditions.on_battery:
        yield "this machine runs on battery, which may slow it"
    if found.conditions.low_power_mode:
        yield "this machine is in low power mode, which slows it"
    if any(one.ms_per_token is None for one in found.runs):
        yield "only one token was generated: decoding has no speed"

"""What will be run: lengths in tokens, times in milliseconds, quality in nats a token."""

from __future__ import annotations

import sys

import msgspec

from veloxquant.errors import InvalidParams, quoted

OBJECTIVES = ("balanced", "memory", "latency", "throughput", "quality")

# Twice the longest context any published model states is 2**24; beyond 2**27 a length is a slip of the finger.
MAX_CONTEXT_TOKENS = 2**27
MAX_ROWS = 2**16
MAX_PREFILL_STEP = 2**20


class WorkloadProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload. Raises InvalidParams naming the field when a value is out of range."""

    context_length: int = 4096
    """Prompt tokens of one sequence."""
    generation_length: int = 512
    """Tokens generated after the prompt; each of them is fed to the cache."""
    batch_size: int = 1
    num_concurrent_requests: int = 1
    """Slots served side by side; caches scale with batch_size x num_concurrent_requests."""
    objective: str = "balanced"
    max_latency_ms: float | None = None
    """Ceiling for decode latency a token at the end of the context."""
    max_kl: float | None = None
    """Hard ceiling for the mean KL divergence from the 16-bit cache, nats a token."""
    allow_eviction: bool = False
    prefill_step_size: int = 2048

    @property
    def tokens(self) -> int:
        """Tokens in one sequence's cache at the end: context_length + generation_length."""
        return self.context_length + self.generation_length

    @property
    def sequences(self) -> int:
        """Sequences held at once: batch_size x num_concurrent_requests."""
        return self.batch_size * self.num_concurrent_requests

    def __post_init__(self) -> None:
        """Refuse what no workload can be."""
        _whole("context_length", self.context_length, 1, MAX_CONTEXT_TOKENS)
        _whole("generation_length", self.generation_length, 0, MAX_CONTEXT_TOKENS)
        _whole("batch_size", self.batch_size, 1, MAX_ROWS)
        _whole("num_concurrent_requests", self.num_concurrent_requests, 1, MAX_ROWS)
        _whole("prefill_step_size", self.prefill_step_size, 1, MAX_PREFILL_STEP)
        _positive("max_latency_ms", self.max_latency_ms)
        _positive("max_kl", self.max_kl)
        if self.objective not in OBJECTIVES:
            raise InvalidParams(
                f"objective is {quoted(self.objective)}, which is not known",
                hint=f"use one of {', '.join(OBJECTIVES)}",
                field="objective",
            )


def _whole(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    raise InvalidParams(
        f"{field} is {quoted(value)}, which is not a whole number from {low} to {high}",
        hint=f"give {field} as a number of {'tokens' if 'length' in field or 'step' in field else 'sequences'}",
        field=field,
    )


def _positive(field: str, value: object) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, since math.isfinite itself fails on a whole number that no float can hold.
    if number and 0 < value <= sys.float_info.max:  # type: ignore[operator]
        return
    raise InvalidParams(
        f"{field} is {quoted(value)}, which is not a finite number above 0",
        hint=f"leave {field} out for no limit",
        field=field,
    )

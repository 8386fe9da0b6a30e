"""What a plan says, as frozen values; field for field the protocol's `plan` result (docs/protocol.md).

Sizes in bytes, lengths in tokens, times in milliseconds, quality in nats a token. None means not known, and the
evidence's notes say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

SCHEMA = "veloxquant.plan/1"
CACHE_CONFIG_SCHEMA = "veloxquant.cache_config/1"
"""Of what `veloxquant.apply` takes."""

Decision = Literal["keep_fp16", "quantize", "nothing_to_quantize", "no_fit", "weights_do_not_fit"]
Source = Literal["measured", "calibrated", "published", "traced", "analytic", "prior"]
Reason = Literal[
    "not_supported_by_engine",
    "width_not_divisible",
    "does_not_fit",
    "buffer_too_large",
    "quality_below_floor",
    "too_slow",
    "drops_tokens",
    "family_rule",
    "quarantined",
    "not_requested",
    "not_calibrated",
]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Where one group of figures comes from, and how far to trust it (0..1); notes say what lowered it."""

    source: Source
    record_ids: tuple[str, ...] = ()
    confidence: float = 1.0
    notes: tuple[str, ...] = ()


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Layer counts under one variant; packed + kept = total, and a layer of several parts counts as each of them.

    `reasons` maps a kept kind ("window", "state", "latent", ...) to a sentence.
    """

    total: int
    growing: int
    windowed: int
    recurrent: int
    latent: int
    shared: int
    packed: int
    kept: int
    reasons: Mapping[str, str] = {}


class MemoryTerm(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` identical cache parts of one sequence, as the arithmetic counted them before any record.

    bytes = layers x (slots x heads x (key_bits x key_width + value_bits x value_width) / 8 + fixed_bytes).
    """

    layers: int
    packed: bool
    kind: str
    heads: int
    key_width: int
    value_width: int
    key_bits: float
    value_bits: float
    slots: int
    fixed_bytes: int
    bytes: int
    params: Mapping[str, Any] = {}
    """What the method's parameters are on these layers, where they differ from the variant's own."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences together. ratio = stored_bytes / fp16_bytes. bytes_per_token is rounded up.

    fixed_bytes: what no further token adds to once windows, and a method's bounded memory, are full.
    """

    stored_bytes: int
    peak_bytes: int
    fixed_bytes: int
    bytes_per_token: int
    fp16_bytes: int
    ratio: float
    largest_buffer_bytes: int
    evidence: Evidence
    terms: tuple[MemoryTerm, ...] = ()


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """total_bytes = weights + peak + active + reserve; headroom against the budget (negative: short by)."""

    total_bytes: int
    headroom_bytes: int
    max_context_tokens: int


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """At the end of the asked context. decode_tok_s is over all sequences; low and high bound latency_ms_per_token."""

    prefill_tok_s: float | None
    decode_tok_s: float | None
    latency_ms_per_token: float | None
    low: float | None
    high: float | None
    evidence: Evidence


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Mean KL in nats a token against the engine's 16-bit cache; low and high bound kl_mean."""

    kl_mean: float
    perplexity_delta: float | None
    low: float
    high: float
    evidence: Evidence


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One variant that could be used, with every figure and where it is from."""

    method: str
    params: Mapping[str, Any]
    label: str
    layers: Layers
    memory: Memory
    fit: Fit
    speed: Speed
    quality: Quality
    cache_config: Mapping[str, Any]
    """What `veloxquant.apply` takes: {"schema": "veloxquant.cache_config/1", "method", "label", "params",
    "packed_layers": [int], "layer_count": int, "packed_shapes": [[KV heads, key width, value width]] (one for
    all packed layers, or one for each), "prefill_step_size": int}, and "layer_params": one mapping for each of
    packed_layers where the method's parameters differ from layer to layer."""
    engine_settings: Mapping[str, Any] | None
    tokens_held: int | None = None
    """Most tokens that a packed layer still holds of one sequence at the end; None for a variant that drops none."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A variant that was not used, why, by how many bytes it missed, and what the figure that it missed by rests on.

    `evidence` is None where no figure decided.
    """

    method: str
    params: Mapping[str, Any]
    label: str
    reason: Reason
    detail: str
    short_by_bytes: int | None = None
    evidence: Evidence | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """kv_budget_bytes = min(working set, total memory) - weights - active - reserve, capped by memory_budget_bytes."""

    working_set_bytes: int | None
    weights_bytes: int | None
    active_bytes: int
    reserve_bytes: int
    kv_budget_bytes: int | None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A warning or a suggestion: a stable code, a sentence, and for suggestions the number that would work."""

    code: str
    text: str
    value: Any = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Same request and snapshot, same bytes."""

    schema: str = SCHEMA
    plan_id: str = ""
    generation: int = 0
    source: Literal["daemon", "local"] = "local"
    decision: Decision
    chosen: Candidate | None
    alternatives: tuple[Candidate, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    hardware: Mapping[str, Any]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    engine: Mapping[str, Any]
    budget: Budget
    warnings: tuple[Note, ...] = ()
    suggestions: tuple[Note, ...] = ()

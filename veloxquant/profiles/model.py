"""A model as the planner sees it: its engine's own caches, layer by layer, and what its weights cost."""

from __future__ import annotations

from typing import Literal

import msgspec

ENGINE_OWN = "fp16"
"""Name of the method that leaves the engine's own caches in place; it is the engine itself, so no trace tries it."""

PartKind = Literal["kv", "window", "chunked", "concat", "state"]


class CachePart(msgspec.Struct, frozen=True, kw_only=True):
    """One growing pair of buffers, or one state of constant size, inside one layer's cache, for one sequence.

    kind "kv": the engine's KVCache, slots grow in steps of `step` (facts in docs/engine.md).
    kind "window": RotatingKVCache of `window` slots, `keep` of them sinks.
    kind "chunked": ChunkedKVCache of `window` tokens a chunk.
    kind "concat": ConcatenateKVCache, exactly the tokens held, no slack.
    kind "state": arrays whose size does not depend on length; only `state_bytes` counts.
    """

    kind: PartKind
    engine_class: str
    heads: int = 0
    """KV heads."""
    query_heads: int = 0
    """Query heads of the engine's attention over it; 0: not known, as where a model computes attention itself."""
    key_width: int = 0
    value_width: int = 0
    key_itemsize: int = 0
    """Bytes of one stored key number in the engine's own cache."""
    value_itemsize: int = 0
    dtype: str = ""
    window: int = 0
    keep: int = 0
    step: int = 256
    latent: bool = False
    """K slot holds a compressed latent (multi-head latent attention) and V slot its rope key or nothing."""
    state_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes one slot of one sequence takes: heads x (key_width x itemsize + value_width x itemsize)."""
        return self.heads * (self.key_width * self.key_itemsize + self.value_width * self.value_itemsize)


class CacheLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the engine's own cache list."""

    index: int
    engine_class: str
    parts: tuple[CachePart, ...]

    @property
    def packable(self) -> CachePart | None:
        """The growing part a method may replace: the layer is one plain KVCache and nothing else."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only if only is not None and only.kind == "kv" and self.engine_class == "KVCache" else None


class KeptLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that keeps the engine's own cache under a variant, and why."""

    index: int
    reason: str
    """Stable word: "window", "state", "latent", "composite", "donor", "sinks", "engine_error", "width"."""
    detail: str = ""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace saw with one variant's caches put in place.

    The caches of `packed` layers were called by the real model and hold exactly the bytes the method declares.
    `refused` is the engine's own error when no layer could take the variant. `untried` says why the variant was not
    put before the engine at all (it lacks a calibration); then nothing else is known.
    """

    method: str
    label: str
    packed: tuple[int, ...] = ()
    kept: tuple[KeptLayer, ...] = ()
    refused: str | None = None
    layer_params: tuple[tuple[tuple[str, int | float | str | bool], ...], ...] = ()
    """(name, value) pairs of each packed layer's own parameters, in the order of `packed`; () where all are alike."""
    untried: str = ""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One model under one engine. `layers` is the engine's cache list in order; sizes in bytes."""

    model_id: str
    architecture: str = "unknown"
    """Slug for fuzzy matching of records: the config's model_type."""
    source: str = "given"
    """"traced", "static" or "given"."""
    confidence: float = 1.0
    notes: tuple[str, ...] = ()
    config_hash: str = ""
    engine_name: str = "mlx-lm"
    engine_version: str | None = None
    dtype: str = "bfloat16"
    """What the model computes in; K and V follow it."""
    num_layers: int = 0
    """Transformer blocks; can differ from len(layers)."""
    shared_layers: int = 0
    """Blocks that attend to another block's K and V and hold none of their own."""
    layers: tuple[CacheLayer, ...] = ()
    query_heads: int | None = None
    head_width: int | None = None
    hidden_size: int | None = None
    max_position: int | None = None
    num_parameters: int | None = None
    active_parameters: int | None = None
    """Parameters used for one token: all but unselected experts."""
    weights_bytes: int | None = None
    weights_source: str = ""
    """"safetensors", "traced", "given" or why it is unknown."""
    read_bytes_per_token: int | None = None
    """Weight bytes read to decode one token: experts selected only, one row of an untied embedding."""
    weight_bits: float | None = None
    """weights_bytes x 8 / num_parameters."""
    fused_attention: bool = True
    """The engine's own float path uses a fused kernel (no score matrix) on every growing layer."""
    probes: tuple[Probe, ...] = ()
    unkept: str | None = None
    """Why the disk could not keep this trace, with the way out; None when it could."""

    def probe(self, label: str) -> Probe | None:
        """What the trace saw for the variant of this label, None where it was not tried."""
        return next((p for p in self.probes if p.label == label), None)

"""One request in, its answers out: the engine's own caches first, then each variant in their place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec

from veloxquant.models import fields
from veloxquant.models.exchange import PREFILL_TOKENS, Failed, Probed, Traced
from veloxquant.models.trace_worker import engine, heads, layers, parameters
from veloxquant.models.trace_worker.engine import EngineRefused
from veloxquant.models.trace_worker.factory import load_factory
from veloxquant.models.trace_worker.probes import Prober
from veloxquant.profiles.model import ModelProfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from veloxquant.models.exchange import Answer, TraceRequest
    from veloxquant.models.trace_worker.parameters import Cost, Seen
    from veloxquant.profiles.model import CacheLayer

MAX_PARAMETERS = 2**50
"""A thousand times the largest model that was published; its bytes are still exact in JSON."""


def answers(request: TraceRequest) -> Iterator[Answer]:
    """Trace one model: a Failed, or a Traced and then a Probed for each variant asked for.

    Everything runs on the CPU device and nothing is evaluated, so that no GPU is touched and no weight exists.
    """
    mx.set_default_device(mx.cpu)
    config: dict[str, Any] = json.loads(request.config_json)
    try:
        import mlx_lm.utils  # noqa: F401 -- is the engine there, whatever the model
    except ImportError as error:
        yield Failed(kind="engine_missing", message=f"mlx-lm cannot be imported: {error}", hint="pip install mlx-lm")
        return
    try:
        profile = trace(config, request.dtype)
        yield Traced(profile=_named(profile, request))
        if request.probes:
            # Counting packed the first model's weights; another one costs milliseconds.
            model = engine.build(config, request.dtype)
            factory = load_factory(request.factory, request.tried)
            prober = Prober(model, profile, factory, request.calibration)
            yield from (Probed(probe=prober.probe(wanted)) for wanted in request.probes)
    except EngineRefused as refusal:
        yield Failed(kind=refusal.kind, message=str(refusal), hint=refusal.hint)


def trace(config: Mapping[str, Any], dtype: str) -> ModelProfile:
    """What the engine says of a config: layers from its own caches, cost from its own weights. Raises EngineRefused."""
    model = engine.build(config, dtype)
    with parameters.watching() as seen, heads.noting() as query_heads:
        caches, states = engine.traced_caches(model, config, layers.state_bytes)
    found = layers.read(caches, states, config, query_heads)
    blocks = getattr(model, "layers", None)
    count = len(blocks) if blocks is not None else fields.whole(config, fields.NUMBER_OF_LAYERS) or len(found)
    shared, notes = _without_cache(config, count - len(found))
    return _with_cost(
        ModelProfile(
            model_id="",
            architecture=str(config["model_type"]),
            source="traced",
            notes=notes,
            dtype=dtype,
            num_layers=count,
            shared_layers=shared,
            layers=found,
            query_heads=fields.whole(config, fields.QUERY_HEADS) or _heads(seen),
            head_width=fields.head_width(config, found),
            hidden_size=fields.whole(config, fields.HIDDEN_SIZE),
            max_position=fields.whole(config, fields.MAX_POSITION),
            fused_attention=_fused(seen, found),
        ),
        parameters.cost(model, config, seen),
    )


def _without_cache(config: Mapping[str, Any], absent: int) -> tuple[int, tuple[str, ...]]:
    """Blocks with no entry in the cache list: those that share another's K and V, and a note on the others."""
    if absent <= 0:
        return 0, ()
    sharing = min(fields.whole(config, fields.SHARED_LAYERS) or 0, absent)
    others = absent - sharing
    return sharing, (f"{others} blocks have no attention and hold no cache",) if others else ()


def _with_cost(profile: ModelProfile, cost: Cost) -> ModelProfile:
    if cost.parameters > MAX_PARAMETERS:
        raise EngineRefused(
            "config_invalid",
            f"the config describes a model of {cost.parameters} parameters, and none has more than {MAX_PARAMETERS}",
            "give the config.json of the checkpoint",
        )
    return msgspec.structs.replace(
        profile,
        num_parameters=cost.parameters,
        active_parameters=cost.active_parameters,
        weights_bytes=cost.weights_bytes,
        weights_source=cost.unknown or "traced",
        read_bytes_per_token=cost.read_bytes_per_token,
    )


def _named(profile: ModelProfile, request: TraceRequest) -> ModelProfile:
    return msgspec.structs.replace(profile, model_id=request.model_id, config_hash=request.config_hash)


def _heads(seen: Seen) -> int | None:
    return seen.query_shapes[0][1] if seen.query_shapes else None


def _fused(seen: Seen, found: tuple[CacheLayer, ...]) -> bool:
    """Whether the prefill call used the fused kernel in as many layers as attend, without a score-sized mask."""
    attending = sum(any(part.kind != "state" for part in layer.parts) for layer in found)
    return sum(shape[2] == PREFILL_TOKENS for shape in seen.query_shapes) >= attending

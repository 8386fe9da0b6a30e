"""What the weights cost: counted, packed as the config says, and how much of them one decoded token reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from veloxquant.models import fields

_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@dataclass
class Seen:
    """What one call of the model did with its weights and its attention kernel."""

    experts_used: dict[int, int] = field(default_factory=dict)
    """id of a grouped-expert module -> experts one token used."""
    looked_up: set[int] = field(default_factory=set)
    """ids of embeddings rows were taken from."""
    multiplied: set[int] = field(default_factory=set)
    """ids of embeddings that were also multiplied by (tied to the output)."""
    query_shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Query shapes of the fused attention calls that made no score-sized mask."""


@contextmanager
def watching() -> Iterator[Seen]:
    """Watch the engine's embeddings, expert layers and fused attention while the block runs."""
    from mlx_lm.models.switch_layers import SwitchLinear

    seen = Seen()
    embed, as_linear, experts, fused = (
        nn.Embedding.__call__,
        nn.Embedding.as_linear,
        SwitchLinear.__call__,
        mx.fast.scaled_dot_product_attention,
    )

    def watched_embed(module: Any, x: Any) -> Any:
        seen.looked_up.add(id(module))
        return embed(module, x)

    def watched_as_linear(module: Any, x: Any) -> Any:
        seen.multiplied.add(id(module))
        return as_linear(module, x)

    def watched_experts(module: Any, x: Any, indices: Any, *args: Any, **options: Any) -> Any:
        seen.experts_used[id(module)] = indices.size
        return experts(module, x, indices, *args, **options)

    def watched_fused(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        mask = options.get("mask")
        score_sized = isinstance(mask, mx.array) and mask.size >= q.shape[1] * q.shape[2] * k.shape[2]
        if not score_sized:
            seen.query_shapes.append(tuple(q.shape))
        return fused(q, k, v, *args, **options)

    try:
        nn.Embedding.__call__, nn.Embedding.as_linear = watched_embed, watched_as_linear
        SwitchLinear.__call__, mx.fast.scaled_dot_product_attention = watched_experts, watched_fused
        yield seen
    finally:
        nn.Embedding.__call__, nn.Embedding.as_linear = embed, as_linear
        SwitchLinear.__call__, mx.fast.scaled_dot_product_attention = experts, fused


@dataclass(frozen=True)
class Cost:
    """Parameters and bytes of the whole model, and of what one decoded token reads. Bytes None: `unknown` says why."""

    parameters: int
    active_parameters: int
    weights_bytes: int | None
    read_bytes_per_token: int | None
    unknown: str = ""


def cost(model: Any, config: Mapping[str, Any], seen: Seen) -> Cost:
    """Count a model whose single-token call was watched. Packs it in place: call it last.

    Active parameters leave out the experts a token does not use; bytes read also leave out all rows but one of an
    embedding that is not tied to the output.
    """
    shares = _Shares(model, seen)
    plain = _sizes(model, lambda _: 1)
    parameters = sum(plain.values())
    active = sum(shares.of(name, rows=False) * size for name, size in plain.items())
    unknown = _pack(model, config)
    if unknown:
        return Cost(parameters, round(active), None, None, unknown)
    packed = _sizes(model, lambda array: array.itemsize)
    read = sum(shares.of(name, rows=True) * size for name, size in packed.items())
    return Cost(parameters, round(active), sum(packed.values()), round(read))


class _Shares:
    """Which share of a module's weights one token uses, by the module's path."""

    def __init__(self, model: Any, seen: Seen) -> None:
        self._experts: dict[str, Fraction] = {}
        self._rows: dict[str, Fraction] = {}
        named = dict(model.named_modules())
        tied_by_hand = _tied_by_hand(named, seen)
        for path, module in named.items():
            if id(module) in seen.experts_used:
                count = module.num_experts
                self._experts[path] = Fraction(min(seen.experts_used[id(module)], count), count)
            elif id(module) in seen.looked_up - seen.multiplied and path != tied_by_hand:
                self._rows[path] = Fraction(1, module.weight.shape[0])

    def of(self, name: str, *, rows: bool) -> Fraction:
        path = name.rpartition(".")[0]
        share = self._experts.get(path, Fraction(1))
        return share * self._rows.get(path, 1) if rows else share


def _tied_by_hand(named: Mapping[str, Any], seen: Seen) -> str | None:
    """Path of the token embedding when no output head was seen: then the model multiplies by its weights directly."""
    heights = {path: module.weight.shape[0] for path, module in named.items() if isinstance(module, nn.Embedding)}
    outputs = {module.weight.shape[0] for module in named.values() if isinstance(module, nn.Linear)}
    if not heights or seen.multiplied or max(heights.values()) in outputs:
        return None
    return max(heights, key=lambda path: heights[path])


def _sizes(model: Any, each: Callable[[mx.array], int]) -> dict[str, int]:
    """Numbers of each parameter times what `each` one counts, by path; an array that two modules share counts once.

    The product is Python's: MLX's own size and nbytes wrap at 2**64, which an absurd config reaches.
    """
    counted: dict[int, Any] = {}
    sizes: dict[str, int] = {}
    for name, array in tree_flatten(model.parameters()):
        if isinstance(array, mx.array) and id(array) not in counted:
            counted[id(array)] = array
            sizes[name] = math.prod(array.shape) * each(array)
    return sizes


def _pack(model: Any, config: Mapping[str, Any]) -> str:
    """Quantize the lazy weights as the engine would when it loads the checkpoint; else why that cannot be told."""
    quantization = config.get("quantization")
    if isinstance(quantization, Mapping):
        return _quantize(model, dict(quantization))
    foreign = fields.foreign_quantization(config)
    if foreign is None or fields.widens_float8(config):
        return ""
    method = foreign.get("quant_method")
    if method == "mxfp4":
        return _quantize(model, _MXFP4, experts_only=True)
    return f"the engine decides from the weight files how it loads quantization_config {method!r}"


def _quantize(model: Any, wanted: dict[str, Any], *, experts_only: bool = False) -> str:
    """mlx_lm.utils.quantize_model's default choice of modules, with the config's own entries for single modules."""
    group, bits = wanted.get("group_size"), wanted.get("bits")
    if not isinstance(group, int) or not isinstance(bits, int) or group <= 0:
        return "the config's quantization has no whole group_size and bits"
    own = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: Any) -> Any:
        if path in wanted:
            return wanted[path]
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        if experts_only:
            return hasattr(module, "num_experts")
        chosen = own(path, module) if own is not None else True
        return bool(chosen) if isinstance(chosen, bool) else chosen

    try:
        nn.quantize(model, group, bits, mode=wanted.get("mode", "affine"), class_predicate=predicate)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        return f"the config's quantization cannot be applied: {error}"
    return ""

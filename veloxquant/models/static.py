"""The declared fallback: caches from config fields, for families in a table that was checked against the engine.

Used where mlx-lm cannot be asked. Anything the table does not name is refused, never sized by the usual formula.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from veloxquant.errors import ModelConfigInvalid, ModelNotSupported
from veloxquant.models import fields
from veloxquant.models.resolve import compute_dtype
from veloxquant.profiles.model import CacheLayer, CachePart, ModelProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.models.resolve import ModelSource

CONFIDENCE = 0.7
"""The table agrees with one engine version; another may keep its caches differently."""

_NOTE = "caches were read from config fields and not from the engine; no method was tried on the model"
_MAX_LAYERS = 4096
_MAX_WIDTH = 2**20
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_STATE_ITEMSIZE = 4


class _Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of families.json."""

    layout: Literal["full", "windows", "latent", "expanded", "gated_delta"]
    head_dim: int | Literal["ratio"] | None = None
    sliding_window: int | None = None
    pattern: int | None = None
    by_pattern_only: bool = False
    interval: int | None = None
    fused: bool = True


class _Table(msgspec.Struct, frozen=True):
    families: dict[str, _Family]


def families() -> Mapping[str, object]:
    """The model types the table knows."""
    return _table().families


def read(source: ModelSource) -> ModelProfile:
    """A profile of source "static", without parameter counts and without probes.

    Raises ModelNotSupported naming a model_type the table lacks, ModelConfigInvalid naming a field that is missing.
    """
    config = source.config
    model_type = config.get("model_type")
    family = _table().families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelNotSupported(
            f"model_type {str(model_type)[:64]!r} is not one whose caches are known without mlx-lm",
            hint="install mlx-lm, so that the model's own code can be asked",
            field="model.config",
        )
    dtype, assumed = compute_dtype(source)
    layers = _Reader(config, family, dtype).layers()
    return ModelProfile(
        model_id=source.model_id,
        architecture=str(model_type),
        source="static",
        confidence=CONFIDENCE,
        notes=(_NOTE, *assumed),
        config_hash=source.config_hash,
        dtype=dtype,
        num_layers=len(layers),
        layers=layers,
        query_heads=fields.whole(config, fields.QUERY_HEADS),
        head_width=fields.head_width(config, layers),
        hidden_size=fields.whole(config, fields.HIDDEN_SIZE),
        max_position=fields.whole(config, fields.MAX_POSITION),
        fused_attention=family.fused,
    )


class _Reader:
    """One config, read as its family's row says."""

    def __init__(self, config: Mapping[str, Any], family: _Family, dtype: str) -> None:
        self._config = config
        self._family = family
        self._dtype = dtype

    def layers(self) -> tuple[CacheLayer, ...]:
        """One layer for each block."""
        count = self._need(fields.NUMBER_OF_LAYERS)
        if not 0 < count <= _MAX_LAYERS:
            _invalid(f"{count} layers are not between 1 and {_MAX_LAYERS}")
        layouts: Mapping[str, Callable[[int], list[CachePart]]] = {
            "full": lambda count: [self._plain()] * count,
            "windows": self._windows,
            "latent": lambda count: [self._latent()] * count,
            "expanded": lambda count: [self._expanded()] * count,
            "gated_delta": self._gated_delta,
        }
        parts = layouts[self._family.layout](count)
        return tuple(
            CacheLayer(index=index, engine_class=part.engine_class, parts=(part,)) for index, part in enumerate(parts)
        )

    def _windows(self, count: int) -> list[CachePart]:
        full, sliding = self._plain(), None
        parts = []
        for slides in self._sliding(count):
            if slides and sliding is None:
                sliding = self._plain(window=self._need(("sliding_window",), self._family.sliding_window))
            parts.append(sliding if slides and sliding is not None else full)
        return parts

    def _sliding(self, count: int) -> list[bool]:
        types = self._list("layer_types")
        if types and not self._family.by_pattern_only:
            if len(types) != count:
                _invalid(f"layer_types has {len(types)} entries for {count} layers")
            return [kind == "sliding_attention" for kind in types]
        pattern = self._need(("sliding_window_pattern", "_sliding_window_pattern"), self._family.pattern)
        return [index % max(pattern, 1) != max(pattern, 1) - 1 for index in range(count)]

    def _gated_delta(self, count: int) -> list[CachePart]:
        """Source: mlx_lm.models.qwen3_next; the last kernel - 1 inputs of q, k and v, and a float32 matrix a head."""
        interval = self._need(("full_attention_interval",), self._family.interval)
        keys, values = self._need(("linear_num_key_heads",)), self._need(("linear_num_value_heads",))
        key_width, value_width = self._need(("linear_key_head_dim",)), self._need(("linear_value_head_dim",))
        tail = (self._need(("linear_conv_kernel_dim",)) - 1) * (2 * keys * key_width + values * value_width)
        state = CachePart(
            kind="state",
            engine_class="ArraysCache",
            state_bytes=tail * _ITEMSIZE[self._dtype] + values * value_width * key_width * _STATE_ITEMSIZE,
        )
        full = self._plain()
        return [state if (index + 1) % max(interval, 1) else full for index in range(count)]

    def _plain(self, *, window: int = 0) -> CachePart:
        heads = self._need(fields.QUERY_HEADS)
        width = fields.whole(self._config, fields.HEAD_WIDTH)
        if width is None:
            width = self._need(fields.HIDDEN_SIZE) // max(heads, 1) if self._family.head_dim == "ratio" else None
        if width is None:
            default = self._family.head_dim
            width = self._need(fields.HEAD_WIDTH, default if isinstance(default, int) else None)
        return self._part(self._need(fields.KV_HEADS, heads), width, width, window=window)

    def _latent(self) -> CachePart:
        return self._part(1, self._need(("kv_lora_rank",)), self._need(("qk_rope_head_dim",)), latent=True)

    def _expanded(self) -> CachePart:
        width = self._need(("qk_nope_head_dim",)) + self._need(("qk_rope_head_dim",))
        return self._part(self._need(fields.QUERY_HEADS), width, self._need(("v_head_dim",)))

    def _part(
        self, heads: int, key_width: int, value_width: int, *, window: int = 0, latent: bool = False
    ) -> CachePart:
        for what, count in (("count of KV heads", heads), ("key width", key_width), ("value width", value_width)):
            if not 0 < count <= _MAX_WIDTH:
                _invalid(f"the config gives a {what} of {count}, which is not between 1 and {_MAX_WIDTH}")
        # Latent attention calls the engine's with a score-sized mask; elsewhere what is not fused is the model's own.
        known = latent or self._family.fused
        return CachePart(
            kind="window" if window else "kv",
            engine_class="RotatingKVCache" if window else "KVCache",
            heads=heads,
            query_heads=self._need(fields.QUERY_HEADS) if known else 0,
            key_width=key_width,
            value_width=value_width,
            key_itemsize=_ITEMSIZE[self._dtype],
            value_itemsize=_ITEMSIZE[self._dtype],
            dtype=self._dtype,
            window=window,
            latent=latent,
        )

    def _need(self, names: tuple[str, ...], default: int | None = None) -> int:
        value = fields.whole(self._config, names)
        if value is None:
            value = default
        if value is None:
            _invalid(f"the config has no {names[0]}")
        return value

    def _list(self, name: str) -> list[Any]:
        found = [section[name] for section in fields.sections(self._config) if isinstance(section.get(name), list)]
        return found[0] if found else []


def _invalid(message: str) -> NoReturn:
    raise ModelConfigInvalid(message, hint="give the complete config.json of the checkpoint", field="model.config")


@cache
def _table() -> _Table:
    text = resources.files("veloxquant.models").joinpath("families.json").read_bytes()
    return msgspec.json.decode(text, type=_Table)

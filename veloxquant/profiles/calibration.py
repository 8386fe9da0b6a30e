"""How much a model minds each layer's K and V being kept in few bits: what a calibration run found, as a value."""

from __future__ import annotations

import functools
import hashlib
from typing import Final, Literal

import msgspec

from veloxquant.errors import InvalidParams

CALIBRATION_SCHEMA: Final = "veloxquant.calibration.v1"

PerHead = tuple[tuple[float, ...], ...]
"""One row for each KV head, one number for each of the calibration's `bits`."""


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the engine's cache list: mean KL in nats a token, against the 16-bit cache, that quantizing costs.

    A number of `key` is what the model diverged by when only this head's keys were kept in so many bits; `value` alike.
    """

    index: int
    key: PerHead
    value: PerHead
    key_order: tuple[tuple[int, ...], ...] = ()
    """For each KV head its key channels, from the one whose quantization costs most on; () where none was found."""
    key_classes: PerHead = ()
    """As `key`, for all heads together and one class of channels at a time: the first so many of each head's order."""

    @property
    def tables(self) -> PerHead:
        """Every row of figures."""
        return (*self.key, *self.value, *self.key_classes)


class Calibration(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What one calibration run measured on one model. Raises InvalidParams where its tables do not match its bits."""

    schema: Literal["veloxquant.calibration.v1"] = CALIBRATION_SCHEMA
    model_id: str
    architecture: str
    config_hash: str
    """SHA-256 of the config, as in ModelProfile: another config's figures say nothing about this model."""
    tokens: int
    """Tokens of the text that were scored."""
    text: str
    """What was read: a name, or a digest of it."""
    created_at: str = ""
    """ISO 8601."""
    engine_version: str | None = None
    mlx_version: str | None = None
    bits: tuple[int, ...]
    """Widths that were measured, ascending; columns of every table."""
    layers: tuple[LayerSensitivity, ...]
    """Ascending by index; layers that cannot be packed are left out."""

    def __post_init__(self) -> None:
        """Refuse tables that cannot be read column by column."""
        if not self.bits or list(self.bits) != sorted(set(self.bits)):
            raise _wrong("bits", f"the widths {self.bits} are not ascending, each once")
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise _wrong("layers", "its layers are not ascending, each once")
        for layer in self.layers:
            if any(len(row) != len(self.bits) for row in layer.tables):
                raise _wrong("layers", f"layer {layer.index} has not one figure for each of {len(self.bits)} widths")
            if any(not 0 <= kl < float("inf") for row in layer.tables for kl in row):
                raise _wrong("layers", f"layer {layer.index} has a divergence that is negative or no number")
            if any(sorted(order) != list(range(len(layer.key_order[0]))) for order in layer.key_order):
                raise _wrong("layers", f"layer {layer.index} has an order that does not name each channel once")

    def layer(self, index: int) -> LayerSensitivity | None:
        """What was measured at this place of the engine's cache list, None where nothing was."""
        return next((layer for layer in self.layers if layer.index == index), None)


@functools.lru_cache(maxsize=64)
def digest(calibration: Calibration) -> str:
    """SHA-256 of the whole, hexadecimal: megabytes for a large model, and asked for with every plan."""
    return hashlib.sha256(msgspec.json.encode(calibration)).hexdigest()


def _wrong(field: str, why: str) -> InvalidParams:
    return InvalidParams(f"this is no calibration: {why}", hint="calibrate the model again", field=field)

"""What was measured: one layer, and all layers of a model. The documented figures, and beside them honest ones.

The documented ("first") figures follow fixed formulas whatever the shapes: one key is 2 x head_dim bytes, however many
heads and rows it has, values cost nothing, tokens are summed over layers, memory is what a cache says of itself. The
honest figures, listed after them, count arrays: all heads, all rows, keys and values, found by walking the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from veloxquant.errors import InvalidParams, quoted
from veloxquant.profiling.timeline import TimelinePoint  # noqa: TC001 -- the type of a field can be asked for

_BOOKKEEPING_BYTES = 1024


def _over(part: float, whole: float) -> float:
    """The ratio; 0.0 where whole <= 0, inf where it is too large for a float."""
    if whole <= 0:
        return 0.0
    try:
        return part / whole
    except OverflowError:
        # Whole numbers are exact first. With a float on the other side, Python refuses the whole number itself.
        return math.inf if part > whole else 0.0


@dataclass
class LayerProfile:
    """Figures of one cache. Times in ms, sizes in bytes.

    n_quantize_calls: append_key or update_and_fetch calls. n_dequantize_calls: attend calls, 0 when fused.
    quantize_ms_total: all time in append_key; when fused, in update_and_fetch (quantize, store and dequantize).
    dequantize_ms_total, write_ms_total: all time in attend, in append_value; 0 when fused.
    peak_memory_bytes: the largest memory_bytes() or nbytes the cache gave after a call; 0 where it gives none.
    tokens_written: one for each append_key whatever its shape; the tokens (second last dimension of the keys) of each
        update_and_fetch. The documentation contradicts itself: "Number of append_key / update_and_fetch calls (proxy
        for tokens stored)" against fp16_baseline_bytes as "tokens_written * 2 * head_dim" to which a fused call "adds
        n_tokens * 2 * head_dim", so that one prompt of n tokens would be 1 in the one and n in the other. Tokens it is,
        as only they make that product true for both wrappers and tokens_per_sec a rate of tokens.
    is_fused: one time for quantize, store and dequantize together, in quantize_ms_total.

    true_fp16_bytes: 16-bit bytes of the K and V given since counting began: every head, row and both widths.
        What a window dropped or a draft took back was given, and counts.
    resident_bytes, peak_resident_bytes: bytes of all mx.arrays reachable from the cache, when the profile was taken
        and the largest seen after any call.
    reported_bytes: what the cache said of itself at the moment of resident_bytes; None where it says nothing or raises.
    sequence_tokens: tokens of the sequence: the cache's offset (of the longest row), else its length, else 0.
    tokens_before: sequence tokens that the cache held already when counting began; true_fp16_bytes lacks them.
    timeline: update by update, at most 4,096 points.
    """

    layer_id: Any
    n_quantize_calls: int = 0
    n_dequantize_calls: int = 0
    quantize_ms_total: float = 0.0
    dequantize_ms_total: float = 0.0
    write_ms_total: float = 0.0
    peak_memory_bytes: int = 0
    tokens_written: int = 0
    fp16_baseline_bytes: int = 0
    is_fused: bool = False
    true_fp16_bytes: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    reported_bytes: int | None = None
    sequence_tokens: int = 0
    tokens_before: int = 0
    timeline: tuple[TimelinePoint, ...] = field(default=(), repr=False)

    @property
    def quantize_ms_mean(self) -> float:
        """quantize_ms_total / n_quantize_calls, 0.0 without calls."""
        return _over(self.quantize_ms_total, self.n_quantize_calls)

    @property
    def dequantize_ms_mean(self) -> float:
        """dequantize_ms_total / n_dequantize_calls, 0.0 without calls."""
        return _over(self.dequantize_ms_total, self.n_dequantize_calls)

    @property
    def compression_ratio(self) -> float:
        """fp16_baseline_bytes / peak_memory_bytes, 0.0 where peak_memory_bytes <= 0. See resident_ratio."""
        return _over(self.fp16_baseline_bytes, self.peak_memory_bytes)

    @property
    def resident_ratio(self) -> float:
        """resident_bytes / true_fp16_bytes: 0.28 is 0.28 of what 16 bits take. 0.0 where that is not known.

        Not known without K and V, and for a cache that was not empty when counting began.
        """
        return 0.0 if self.tokens_before else _over(self.resident_bytes, self.true_fp16_bytes)

    @property
    def reported_difference(self) -> int | None:
        """reported_bytes - resident_bytes; None where the cache reports nothing."""
        return None if self.reported_bytes is None else self.reported_bytes - self.resident_bytes

    @property
    def is_lying(self) -> bool:
        """The cache says other bytes of itself than its mx.arrays take; also said of one that keeps other arrays.

        By more than 1,024 bytes and more than 1 % of resident_bytes. Below that are bookkeeping arrays that a class
        leaves out of its nbytes: the offsets, paddings and lengths of mlx-lm's batches, 4 to 16 bytes a row, 1,024 for
        64 rows. The share keeps the same rows of a large cache from an accusation that changes no decision; a claim
        that hides tokens hides more. reported_difference is exact.
        """
        difference = abs(self.reported_difference or 0)
        return difference > _BOOKKEEPING_BYTES and 100 * difference > self.resident_bytes


@dataclass
class ProfileReport:
    """Profiles of all layers in order, and the wall time in seconds that they cover, as the caller measured it.

    Raises InvalidParams (`field` is elapsed_s) for a time that is negative, not finite or no real number, also where it
    is set later.
    """

    layers: list[LayerProfile] = field(default_factory=list)
    elapsed_s: float = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _elapsed(value) if name == "elapsed_s" else value)

    @property
    def total_bytes_written(self) -> int:
        """Sum of peak_memory_bytes over layers."""
        return sum(layer.peak_memory_bytes for layer in self.layers)

    @property
    def total_tokens(self) -> int:
        """Sum of tokens_written over layers: a token counts once in each layer. See sequence_tokens."""
        return sum(layer.tokens_written for layer in self.layers)

    @property
    def tokens_per_sec(self) -> float:
        """total_tokens / elapsed_s, 0.0 where elapsed_s <= 0. See sequence_tokens_per_sec."""
        return _over(self.total_tokens, self.elapsed_s)

    @property
    def overall_compression_ratio(self) -> float:
        """Sum of fp16_baseline_bytes / total_bytes_written, 0.0 where that is <= 0. See resident_ratio."""
        baseline = sum(layer.fp16_baseline_bytes for layer in self.layers)
        return _over(baseline, self.total_bytes_written)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the sequence: the most of any layer, not summed."""
        return max((layer.sequence_tokens for layer in self.layers), default=0)

    @property
    def sequence_tokens_per_sec(self) -> float:
        """Tokens by which the sequence grew while it was counted / elapsed_s, 0.0 where elapsed_s <= 0."""
        grown = max((layer.sequence_tokens - layer.tokens_before for layer in self.layers), default=0)
        return _over(grown, self.elapsed_s)

    @property
    def true_fp16_bytes(self) -> int:
        """Sum over layers."""
        return sum(layer.true_fp16_bytes for layer in self.layers)

    @property
    def resident_bytes(self) -> int:
        """Sum over layers."""
        return sum(layer.resident_bytes for layer in self.layers)

    @property
    def peak_resident_bytes(self) -> int:
        """Sum of the layers' peaks. Layers may peak at different moments: no less than the peak of all together."""
        return sum(layer.peak_resident_bytes for layer in self.layers)

    @property
    def reported_bytes(self) -> int | None:
        """Sum over layers; None where one reports nothing."""
        reported = [layer.reported_bytes for layer in self.layers]
        return None if None in reported else sum(one or 0 for one in reported)

    @property
    def resident_ratio(self) -> float:
        """resident_bytes / true_fp16_bytes over the layers where that is known, 0.0 where it is known of none."""
        known = [layer for layer in self.layers if layer.resident_ratio]
        given = sum(layer.true_fp16_bytes for layer in known)
        return _over(sum(layer.resident_bytes for layer in known), given)


def _elapsed(value: object) -> float:
    """Seconds as a float, from any real number (NumPy's, too). Raises InvalidParams."""
    try:
        seconds = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidParams(
            f"elapsed_s is {quoted(value)}, which is no time that passed",
            hint="give the seconds between two calls of time.perf_counter(), or leave it out",
            field="elapsed_s",
        )
    return seconds

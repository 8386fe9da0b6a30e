"""One rule from a hard case to what an author claims: all methods are scaled alike, so that none looks better by it.

The hard case is SmolLM2-135M-Instruct (head width 64) over 4,096 tokens: a small model with narrow heads suffers most.
Each method has its figures there, from one bench (bench/quality.py) where a variant was run. What other models lose is
a share of that. The shares are known for the engine's affine format and for rotated levels of another engine only; that
they hold for other formats, for dropped tokens and at other lengths is an assumption.
"""

from __future__ import annotations

from veloxquant.methods.method import QualityPrior

MIDDLE = 0.44
"""Typical share of the hard case: Llama-3.2-3B (0.051 nats at 4 bits, 0.0002 at 8, groups of 64; 4-bit weights;
github.com/IonDen/mlx-quant-fidelity) over SmolLM2-135M with K and V in float32 (0.129 and 0.00041), geometric mean of
0.39 and 0.49. Over the same with K and V in float16 (0.141 and 0.00049) it is 0.39: the larger one promises less."""

LOW = 0.053
"""Best share seen: Qwen3.5-35B-A3B has 0.016145 at llama.cpp's turbo3 and 0.009633 at turbo4 (github.com/TheTom/
turboquant_plus, docs/benchmarks.md), over 0.303 and 0.072 of TurboQuant at 3 and 4 bits in the hard case 0.053 and
0.134; at q4_0 (4.5 bits, as the affine format's 4) it has 0.0081, over 0.129 to 0.141 about 0.06."""

SCALED = "scaled by what Llama-3.2-3B (middle) and Qwen3.5-35B-A3B (lower end) lose of it in published comparisons"
REALLY_PACKED = "SmolLM2-135M at 4,096 tokens, really packed (bench/quality.py, K and V in float16; upper end)"
SIMULATED = "SmolLM2-135M at 4,096 tokens, simulated (upper end)"


def from_hard_case(hard: float, source: str) -> QualityPrior:
    """The prior of a variant that loses `hard` nats a token there; `source` tells where that figure is from."""
    return QualityPrior(kl_mean=hard * MIDDLE, low=hard * LOW, high=hard, source=f"{source}, {SCALED}")


def measured_or(measured: float | None, simulated: float) -> QualityPrior:
    """The figure of real caches, where there is one, else the simulated one; the source says which."""
    if measured is not None:
        return from_hard_case(measured, REALLY_PACKED)
    return from_hard_case(simulated, SIMULATED)

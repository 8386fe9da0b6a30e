"""Speed, memory and text of a method on a real model, with the conditions they were measured under.

    subject = Subject("affine4-g64", "affine", build=lambda: KVCacheBuilder.for_model(model, config))
    run(model, tokenizer, tokenizer.encode(prompt), subject, max_tokens=100).decode_tok_s

Reading order: `loading` (a model without the network) -> `measurement.run` (one method, profiled and timed) ->
`comparison.compare` (several, beside the engine's own cache) -> `record.publish`. Importing this room loads no mlx.
"""

from __future__ import annotations

from veloxquant.measure.comparison import Comparison, Failure, compare
from veloxquant.measure.conditions import Conditions
from veloxquant.measure.generation import Generation, generate
from veloxquant.measure.measurement import Run, Sample, Subject, run

__all__ = [
    "Comparison",
    "Conditions",
    "Failure",
    "Generation",
    "Run",
    "Sample",
    "Subject",
    "compare",
    "generate",
    "run",
]

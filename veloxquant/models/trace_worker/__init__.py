"""The short-lived process that asks the engine: builds the real model class and calls it without evaluating anything.

The only part of `models` that imports mlx and mlx_lm. Order of reading: __main__ -> tracing -> engine -> heads ->
layers -> parameters -> probes.
"""

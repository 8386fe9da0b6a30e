"""Speed, memory and text of a method on a real model, with the conditions they were measured under.

Reading order: `loading` (a model without the network) -> `choice` (which caches) -> `measurement.run` (one method,
profiled and timed) -> `comparison.compare` (several, beside the engine's own cache) -> `record.publish`.
"""

"""Time and memory of KV caches in real use, honest to the byte: wrap a cache, use it as before, read its profile.

    caches = [MLXCacheProfiler(cache, layer) for layer, cache in enumerate(make_prompt_cache(model))]
    generate(model, tokenizer, prompt, prompt_cache=caches)
    print(format_profile_table(profile_layers(caches)))

Importing this room loads no mlx.
"""

from __future__ import annotations

from veloxquant.profiling.allocator import AllocatorCheck, allocator_check
from veloxquant.profiling.forwarding import unwrapped
from veloxquant.profiling.layers import profile_layers
from veloxquant.profiling.mlx_cache import MLXCacheProfiler
from veloxquant.profiling.report import LayerProfile, ProfileReport
from veloxquant.profiling.standalone import KVCacheProfiler
from veloxquant.profiling.table import format_profile_table
from veloxquant.profiling.timeline import TimelinePoint

__all__ = [
    "AllocatorCheck",
    "KVCacheProfiler",
    "LayerProfile",
    "MLXCacheProfiler",
    "ProfileReport",
    "TimelinePoint",
    "allocator_check",
    "format_profile_table",
    "profile_layers",
    "unwrapped",
]

"""Making our cache classes known to mlx-lm: its `load_prompt_cache` looks a saved class up in its own module."""

from __future__ import annotations

from veloxquant.caches import attention
from veloxquant.caches.engine import cache_module
from veloxquant.errors import EngineUnavailable


def register() -> None:
    """Let mlx-lm load and serve our caches in this process. Building any packed cache does so too.

    Raises EngineUnavailable without a fit mlx-lm, or where the engine has a class of the same name.
    """
    from veloxquant.caches.evicting import EvictingKVCache  # these modules call us
    from veloxquant.caches.evicting_batch import BatchEvictingKVCache
    from veloxquant.caches.packed import PackedKVCache
    from veloxquant.caches.packed_batch import BatchPackedKVCache
    from veloxquant.caches.tiered import TieredKVCache
    from veloxquant.caches.tiered_batch import BatchTieredKVCache

    attention.install()
    module = cache_module()
    ours = (
        PackedKVCache,
        BatchPackedKVCache,
        TieredKVCache,
        BatchTieredKVCache,
        EvictingKVCache,
        BatchEvictingKVCache,
    )
    for cls in ours:
        present = getattr(module, cls.__name__, None)
        if present is not None and present is not cls:
            raise EngineUnavailable(
                f"mlx-lm has a cache class {cls.__name__} of its own: saved caches would be loaded as the wrong one",
                hint="`veloxquantctl doctor` names the mlx-lm version that was tested: install that one",
            )
        setattr(module, cls.__name__, cls)


register_caches = register
"""The name it has in `veloxquant`."""

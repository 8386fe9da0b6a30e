"""Building caches by a method's name and parameters: one standalone, or a list for a loaded model.

    KVCacheBuilder().with_method("affine").with_head_dim(64).with_bit_width(inlier=4).build()
    mlx_lm.generate(model, tokenizer, prompt, prompt_cache=KVCacheBuilder.for_model(model, config))

The methods are those of the registry that plans are made from (docs/decisions/0009-the-builder-lives-in-serve.md).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted
from veloxquant.methods.checks import MAX_BITS
from veloxquant.methods.parameters import check_given, variant_for
from veloxquant.methods.registry import load
from veloxquant.planner.result import Plan
from veloxquant.serve import cache_config
from veloxquant.serve.kv_config import MAX_WIDTH, KVCacheConfig, check_name, check_value, check_whole
from veloxquant.serve.layers import by_config, by_plan
from veloxquant.serve.planned import check_is_model, engine_caches

if TYPE_CHECKING:
    from veloxquant.methods import Calibration, Method, Param, Variant
    from veloxquant.methods.registry import Loaded

__all__ = ["KVCacheBuilder", "KVCacheConfig"]


class KVCacheBuilder:
    """Sets one thing a call, in any order; each setter changes this builder and returns it. `copy` branches off.

    A value that no method takes is refused at once, and one that the chosen method does not take as soon as both are
    known. What is refused leaves the builder as it was. `methods` is a loaded registry, for tests and for callers that
    have one.
    """

    def __init__(self, *, methods: Loaded | None = None) -> None:
        self._methods = methods
        self._method: Method | None = None
        self._head_dim: int | None = None
        self._given: dict[str, Param | None] = {}

    def with_method(self, name: str) -> Self:
        """The method, by its own name. Raises MethodNotFound, InvalidParams for what was set and it does not have."""
        check_name("method", name)
        loaded = load() if self._methods is None else self._methods
        method = loaded.method(name)
        check_given(method, self._given)
        self._method = method
        return self

    def with_head_dim(self, head_dim: int) -> Self:
        """Width of one head's K and of its V."""
        check_whole("head_dim", head_dim, 1, MAX_WIDTH)
        self._head_dim = head_dim
        return self

    def with_bit_width(self, inlier: float, outlier: float | None = None) -> Self:
        """Bits a number (parameter `bits`), and of outlier channels (`outlier_bits`); None: the method's default."""
        _check_bits("bits", inlier)
        if outlier is None:
            return self._set({"bits": inlier}, without="outlier_bits")
        _check_bits("outlier_bits", outlier)
        return self._set({"bits": inlier, "outlier_bits": outlier})

    def with_outlier_channels(self, count: int) -> Self:
        """Channels kept in `outlier_bits` (parameter `outlier_channels`)."""
        check_whole("outlier_channels", count, 0, MAX_WIDTH)
        return self._set({"outlier_channels": count})

    def with_jl_dim(self, rows: int) -> Self:
        """Rows of the Johnson-Lindenstrauss sketch (parameter `jl_dim`)."""
        check_whole("jl_dim", rows, 1, MAX_WIDTH)
        return self._set({"jl_dim": rows})

    def with_seed(self, seed: int) -> Self:
        """Of random rotations and sketches (parameter `seed`)."""
        check_whole("seed", seed, 0, MAX_WHOLE)
        return self._set({"seed": seed})

    def with_group_size(self, size: int) -> Self:
        """Numbers that share a scale (parameter `group`)."""
        check_whole("group", size, 1, MAX_WIDTH)
        return self._set({"group": size})

    def with_parameter(self, name: str, value: Param | None) -> Self:
        """Any parameter by its own name (`Method.parameters` lists them); None: the method's default."""
        check_value(name, False if value is None else value)
        return self._set({name: value})

    def copy(self) -> Self:
        """A builder that stands as this one does and changes by itself."""
        return copy.copy(self)  # what setters change they replace

    def config(self) -> KVCacheConfig:
        """What was set, as a value: a variant's own parameters, or else every parameter, defaults included.

        Raises InvalidParams.
        """
        _, variant = self._chosen()
        return KVCacheConfig(method=variant.method, params=variant.params, head_dim=self._head_dim)

    def build(self) -> Any:
        """A fresh standalone cache of one head: append_key, append_value, append, attend, memory_bytes, len.

        Raises InvalidParams where the method or the head width is not set, MethodRefused for what it cannot keep.
        """
        method, variant = self._chosen()
        if self._head_dim is None:
            raise InvalidParams(
                "a standalone cache needs the width of its head", hint="call with_head_dim", field="head_dim"
            )
        return method.build_standalone(self._head_dim, variant)

    @staticmethod
    def for_model(
        model: Any,
        config: KVCacheConfig | KVCacheBuilder | Plan | Mapping[str, Any],
        *,
        methods: Loaded | None = None,
        calibration: Calibration | None = None,
    ) -> list[Any]:
        """A fresh cache list for a loaded mlx-lm model: the method's caches where they can be, the engine's elsewhere.

        A config packs every plain KVCache layer that the method and the model's own code can take, or just its
        `layers`; a plan (Plan, cache_config, or either as JSON values) packs what it lists. A model that `apply`
        changed is looked at as it was before. Caches of this kind have been through the model once without computing
        before these are made. `calibration` is this model's, for methods that choose each layer's parameters by it; a
        plan has chosen already.

        Raises InvalidParams (malformed, or made for another model), MethodNotFound, MethodRefused with the reason of
        the first layer when none can take the method's cache.
        """
        check_is_model(model)
        if isinstance(config, KVCacheBuilder):
            methods, config = methods or config._methods, config.config()  # noqa: SLF001 -- its own class
        if not isinstance(config, KVCacheConfig | Plan | Mapping):
            raise InvalidParams(
                f"a KVCacheConfig, a KVCacheBuilder or a plan is needed, not an object of type {type(config).__name__}",
                hint="build one: KVCacheBuilder().with_method(...)",
                field="config",
            )
        loaded = load() if methods is None else methods
        if isinstance(config, KVCacheConfig):
            caches = by_config(model, config, loaded, calibration)
        else:
            caches = by_plan(model, cache_config.read(config), loaded)
        return engine_caches(model) if caches is None else caches()

    def _set(self, changes: Mapping[str, Param | None], without: str = "") -> Self:
        given = {name: value for name, value in self._given.items() if name != without} | dict(changes)
        if self._method is not None:
            check_given(self._method, given)
        self._given = given
        return self

    def _chosen(self) -> tuple[Method, Variant]:
        if self._method is None:
            raise InvalidParams("no method is set", hint="call with_method", field="method")
        return self._method, variant_for(self._method, self._given)


def _check_bits(name: str, bits: Any) -> None:
    if type(bits) not in (int, float) or not 0 < bits <= MAX_BITS:
        wanted = f"a number above 0, at most {MAX_BITS:g}"
        raise InvalidParams(f"{name} is {quoted(bits)}, not {wanted}", hint=f"set {name} to {wanted}", field=name)

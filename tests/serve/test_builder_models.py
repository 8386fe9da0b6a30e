"""`for_model` on real mlx-lm models: the method's caches where they can be, the engine's own elsewhere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.packed import PackedKVCache
from veloxquant.errors import InvalidParams, MethodNotFound, MethodRefused
from veloxquant.methods import Method, Parameter, Variant
from veloxquant.methods.registry import Loaded, load
from veloxquant.planner.result import Budget, Plan
from veloxquant.serve.apply import apply, held_bytes
from veloxquant.serve.builder import KVCacheBuilder, KVCacheConfig

AFFINE = KVCacheConfig(method="affine", params={"bits": 4, "group": 32})
FOUR = AffineCodec(64, 4, 32)


def kinds(caches: list[Any]) -> list[type]:
    """The class of each cache."""
    return [type(cache) for cache in caches]


def reading_keys(monkeypatch: pytest.MonkeyPatch, model: Any, reads: Any) -> None:
    """Let the attention of a layer read the keys of a cache as an array; `reads` maps its own cache to which."""
    attention = type(model.model.layers[0].self_attn)
    original = attention.__call__

    def reads_keys(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        out = original(self, x, mask, cache)
        other = reads(cache)
        return out if other is None else out + 0 * other.keys.sum()

    monkeypatch.setattr(attention, "__call__", reads_keys)


def test_generation_is_that_of_the_engines_own_packed_cache(tiny: Any) -> None:
    """The list is a prompt_cache: the very tokens of mlx-lm's own caches at the same bits and groups."""
    model = tiny.llama()
    own = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="affine", params={"bits": 8, "group": 32}))
    assert tiny.generate(model, caches, 70, 12) == tiny.generate(model, own, 70, 12)
    assert held_bytes(caches) == held_bytes(own)


def test_every_form_of_a_config_builds_the_same(tiny: Any) -> None:
    """A config, a builder, a cache_config, a plan as JSON, and what was made of the plan."""
    model = tiny.llama()
    planned = tiny.config(model, "affine4-g32")
    forms = [
        AFFINE,
        KVCacheConfig.from_toml(AFFINE.to_toml()),
        KVCacheBuilder().with_method("affine").with_bit_width(inlier=4).with_group_size(32).with_head_dim(64),
        planned,
        {"schema": "veloxquant.plan/1", "decision": "quantize", "chosen": {"cache_config": planned}},
        KVCacheConfig.from_plan(planned),
    ]
    for form in forms:
        caches = KVCacheBuilder.for_model(model, form)
        assert kinds(caches) == [PackedKVCache] * 3
        assert {(cache.key_codec, cache.value_codec, cache.offset) for cache in caches} == {(FOUR, FOUR, 0)}


def test_a_plan_that_chose_nothing_is_refused(tiny: Any) -> None:
    """With its decision."""
    unknown = Budget(working_set_bytes=None, weights_bytes=None, active_bytes=0, reserve_bytes=0, kv_budget_bytes=None)
    plan = Plan(decision="no_fit", chosen=None, hardware={}, model={}, workload={}, engine={}, budget=unknown)
    with pytest.raises(MethodRefused, match="its decision is 'no_fit'"):
        KVCacheBuilder.for_model(tiny.llama(layers=1), plan)


def test_each_call_gives_a_fresh_list_and_leaves_the_model_alone(tiny: Any) -> None:
    """Two requests share no cache, and the model makes its own caches as before."""
    model = tiny.llama()
    first, second = (KVCacheBuilder.for_model(model, AFFINE) for _ in range(2))
    tiny.generate(model, first, 10, 2)
    assert [cache.offset for cache in second] == [0, 0, 0]
    assert "make_cache" not in vars(model)
    assert kinds(model.make_cache()) == [KVCache] * 3


def test_fp16_is_the_engines_own_list(tiny: Any) -> None:
    """Windows and all, by a config and by a plan that keeps 16 bits."""
    model = tiny.gemma()
    for form in (KVCacheConfig(method="fp16"), tiny.config(model, "fp16"), KVCacheBuilder().with_method("fp16")):
        assert kinds(KVCacheBuilder.for_model(model, form)) == [RotatingKVCache, RotatingKVCache, KVCache] * 2


def test_a_model_with_a_plan_on_it_is_looked_at_as_it_was(tiny: Any) -> None:
    """What `apply` put there neither leaks into the list nor is taken off."""
    model = tiny.llama()
    apply(model, tiny.config(model, "affine8-g64"))
    assert kinds(KVCacheBuilder.for_model(model, KVCacheConfig(method="fp16"))) == [KVCache] * 3
    assert {cache.key_codec.bits for cache in KVCacheBuilder.for_model(model, AFFINE)} == {4}
    assert {cache.key_codec.bits for cache in model.make_cache()} == {8}


def test_windows_keep_the_engines_own(tiny: Any) -> None:
    """Only the full layers of Gemma 3 are packed, and the model runs."""
    model = tiny.gemma()
    caches = KVCacheBuilder.for_model(model, AFFINE)
    assert kinds(caches) == [RotatingKVCache, RotatingKVCache, PackedKVCache] * 2
    assert len(tiny.generate(model, caches, 100, 10, 64)) == 10


def test_a_layer_that_the_model_never_writes_keeps_the_engines_own(tiny: Any) -> None:
    """A cache list longer than the layers that use it is no reason to refuse."""
    model = tiny.llama(layers=2)
    model.make_cache = lambda: [KVCache() for _ in range(3)]
    assert kinds(KVCacheBuilder.for_model(model, AFFINE)) == [PackedKVCache, PackedKVCache, KVCache]


@pytest.mark.parametrize(
    ("reads", "kept"),
    [
        (lambda caches: lambda cache: cache if cache is caches[1] else None, 1),
        (lambda caches: lambda cache: caches[0] if cache is caches[2] else None, 0),
    ],
    ids=["its own keys", "another layer's keys"],
)
def test_a_layer_whose_keys_the_model_reads_keeps_the_engines_own(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, reads: Any, kept: int
) -> None:
    """The model's own code decides: what it reads as an array is not packed, and no more is kept than it needs."""
    model = tiny.llama(layers=4)
    current: list[Any] = []
    original = type(model).__call__

    def called(self: Any, inputs: Any, cache: Any = None, **options: Any) -> Any:
        current[:] = cache
        return original(self, inputs, cache, **options)

    monkeypatch.setattr(type(model), "__call__", called)
    reading_keys(monkeypatch, model, reads(current))
    caches = KVCacheBuilder.for_model(model, AFFINE)
    expected: list[type] = [PackedKVCache] * 4
    expected[kept] = KVCache
    assert kinds(caches) == expected
    assert len(tiny.generate(model, caches, 20, 3)) == 3


def test_no_layer_left_is_refused_with_the_reason_of_the_first(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's error, the method's word, or the kinds of cache that the model has."""
    wide = tiny.llama(layers=2, width=96)
    with pytest.raises(MethodRefused, match="affine8-g64 caches: layer 0: groups of 64 do not divide the key width 96"):
        KVCacheBuilder.for_model(wide, KVCacheConfig(method="affine"))
    windowed = tiny.llama(layers=2)
    windowed.make_cache = lambda: [RotatingKVCache(max_size=16) for _ in range(2)]
    with pytest.raises(MethodRefused, match="none is a plain growing KVCache; it keeps RotatingKVCache"):
        KVCacheBuilder.for_model(windowed, AFFINE)
    model = tiny.llama()
    reading_keys(monkeypatch, model, lambda cache: cache)
    with pytest.raises(MethodRefused, match="affine4-g32 caches: layer 0: AttributeError: 'list'") as caught:
        KVCacheBuilder.for_model(model, AFFINE)
    assert "another method" in caught.value.hint


def test_a_model_that_cannot_be_called_at_all_says_so(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the method's fault."""
    model = tiny.llama(layers=1)
    monkeypatch.setattr(type(model), "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(MethodRefused, match="cannot run with its own caches: ZeroDivisionError"):
        KVCacheBuilder.for_model(model, AFFINE)


def test_layers_that_are_named_must_all_be_packed(tiny: Any) -> None:
    """A config with layers, as a plan makes one, is for one model, and nothing is left out silently."""
    model = tiny.gemma()
    full = KVCacheConfig.from_plan(tiny.config(model, "affine4-g32", packed=[5]))
    assert kinds(KVCacheBuilder.for_model(model, full))[2:] == [KVCache, *[RotatingKVCache] * 2, PackedKVCache]
    with pytest.raises(MethodRefused, match="layer 0 keeps a RotatingKVCache"):
        KVCacheBuilder.for_model(model, KVCacheConfig(method="affine", layers=(0, 2)))
    with pytest.raises(InvalidParams, match="for 6 caches and this model has 3") as caught:
        KVCacheBuilder.for_model(tiny.llama(), full)
    assert caught.value.field == "layer_count"
    with pytest.raises(InvalidParams, match="layer 6 is to be packed and this model has 6") as caught:
        KVCacheBuilder.for_model(model, KVCacheConfig(method="affine", layers=(2, 6)))
    assert caught.value.field == "layers"
    none = KVCacheConfig(method="affine", layers=())
    assert kinds(KVCacheBuilder.for_model(tiny.llama(), none)) == [KVCache] * 3


def test_a_head_width_that_is_not_the_models_is_refused(tiny: Any) -> None:
    """With the widths there are; without one the model's own count."""
    model = tiny.llama(layers=1)
    with pytest.raises(InvalidParams, match="layer 0 has K 64 and V 64 wide, and head_dim is 128") as caught:
        KVCacheBuilder.for_model(model, KVCacheConfig(method="affine", head_dim=128))
    assert caught.value.field == "head_dim"


def test_wrong_parameters_are_refused_by_name(tiny: Any) -> None:
    """A config is checked against the method when it meets one."""
    model = tiny.llama(layers=1)
    for params, field in (({"bits": 7}, "bits"), ({"seed": 1}, "seed"), ({"group": "32"}, "group")):
        with pytest.raises(InvalidParams) as caught:
            KVCacheBuilder.for_model(model, KVCacheConfig(method="affine", params=params))
        assert caught.value.field == field
    with pytest.raises(MethodNotFound, match="nonesuch"):
        KVCacheBuilder.for_model(model, KVCacheConfig(method="nonesuch"))


@pytest.mark.parametrize("config", [None, "affine", 4, ["affine"], AFFINE.to_toml()])
def test_what_is_no_config_is_refused(tiny: Any, config: Any) -> None:
    """Any object gives a typed error, and so does what is no model."""
    with pytest.raises(InvalidParams, match="a KVCacheConfig, a KVCacheBuilder or a plan is needed") as caught:
        KVCacheBuilder.for_model(tiny.llama(layers=1), config)
    assert caught.value.field == "config"
    with pytest.raises(InvalidParams, match="a loaded mlx-lm model is needed"):
        KVCacheBuilder.for_model(config, AFFINE)


class Picky(Method):
    """Packs as mlx-lm does, in groups that its variants do not list, and not layer 1."""

    name = "picky"

    def variants(self) -> Any:
        """One, in groups of 64."""
        return [Variant(method=self.name, label="picky64", params={"group": 64})]

    def parameters(self) -> Any:
        """Any group of the engine's."""
        return [Parameter(name="group", kind="int", default=64, choices=(32, 64, 128))]

    def build(self, layer: Any, variant: Variant) -> Any:
        """A class with the label on it."""
        if layer.index == 1:
            raise MethodRefused("not layer one")
        cache = QuantizedKVCache(group_size=variant.params["group"], bits=8)
        cache.label = variant.label
        return cache


def test_parameters_beyond_the_variants_reach_the_method(tiny: Any) -> None:
    """And a layer that the method builds no cache for keeps the engine's own."""
    picky = Picky()
    methods = Loaded(methods=(picky,), variants=((picky, picky.variants()[0]),), quarantined=(), fingerprint="")
    model = tiny.llama()
    config = KVCacheConfig(method="picky", params={"group": 32})
    caches = KVCacheBuilder.for_model(model, config, methods=methods)
    assert kinds(caches) == [QuantizedKVCache, KVCache, QuantizedKVCache]
    assert (caches[0].label, caches[0].group_size) == ("picky-group.32", 32)
    builder = KVCacheBuilder(methods=methods).with_method("picky")
    assert KVCacheBuilder.for_model(model, builder)[0].label == "picky64"
    with pytest.raises(MethodNotFound):
        KVCacheBuilder.for_model(model, config, methods=load(only=["affine"]))


def test_looking_at_a_model_computes_nothing_and_keeps_nothing(tiny: Any) -> None:
    """Active memory is what it was, and the model is freed with its last reference: no cycle holds its weights."""
    model = tiny.llama(layers=2)
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        caches = KVCacheBuilder.for_model(model, AFFINE)
        assert mx.get_active_memory() == before
        alive = weakref.ref(model)
        del model
        assert alive() is None
        assert len(caches) == 2
    finally:
        gc.enable()

"""`apply` on real mlx-lm models: what is promised is what is held, and nothing else on the model changes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as engine
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from veloxquant.caches.packed import PackedKVCache
from veloxquant.errors import InvalidParams, MethodNotFound, MethodRefused
from veloxquant.profiles.slots import kv_slots, schedule
from veloxquant.serve.apply import apply, held_bytes, restore


def packed_slot_bytes(heads: int, width: int, bits: int, group: int, itemsize: int = 4) -> int:
    """Bytes of one slot: K and V, each heads x (width x bits / 8 + a scale and a bias for each group)."""
    return 2 * heads * (width * bits // 8 + 2 * (width // group) * itemsize)


@pytest.mark.parametrize(
    ("context", "tokens", "step"),
    [(1, 1, 128), (2, 5, 128), (300, 20, 128), (257, 3, 2048), (512, 1, 256), (600, 180, 300)],
)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
def test_bytes_held_are_slots_times_the_declared_slot(  # noqa: PLR0917 -- the cells of a table
    tiny: Any, context: int, tokens: int, step: int, bits: int, group: int
) -> None:
    """After a real generation the packed caches hold the slots of the rule times the packed slot, chunks included."""
    model = tiny.llama(layers=2)
    apply(model, tiny.config(model, f"affine{bits}-g{group}"))
    caches = make_prompt_cache(model)
    tiny.generate(model, caches, context, tokens, step)
    slots = kv_slots(schedule(context, tokens, step))
    assert held_bytes(caches) == 2 * slots * packed_slot_bytes(2, 64, bits, group)
    assert held_bytes(caches) == sum(cache.nbytes for cache in caches)
    assert [cache.offset for cache in caches] == [context + tokens] * 2


def test_three_hundred_tokens_in_chunks_of_128_take_the_slots_worked_by_hand(tiny: Any) -> None:
    """299 = 128 + 128 + 43: 256 slots, all filled by the second chunk, then 256 more; the 300th fits: 512."""
    model = tiny.llama(layers=1)
    apply(model, tiny.config(model))
    caches = make_prompt_cache(model)
    tiny.generate(model, caches, 300, 1, 128)
    assert caches[0].keys[0].shape == (1, 2, 512, 8)


def test_packed_generation_starts_packed(tiny: Any) -> None:
    """Caches are packed ones before the first token: no float copy is ever made."""
    model = tiny.llama()
    apply(model, tiny.config(model))
    assert [type(cache) for cache in make_prompt_cache(model)] == [PackedKVCache] * 3


def test_eight_bits_generate_what_the_engine_itself_generates_at_eight_bits(tiny: Any) -> None:
    """The planned caches give the very tokens of mlx-lm's own --kv-bits 8, packed from the start."""
    model = tiny.llama()
    own = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    expected = tiny.generate(model, own, 70, 12)
    apply(model, tiny.config(model, "affine8-g32"))
    assert tiny.generate(model, None, 70, 12) == expected


def test_each_call_gives_a_fresh_list(tiny: Any) -> None:
    """Two requests share no cache object."""
    model = tiny.llama()
    apply(model, tiny.config(model))
    first, second = make_prompt_cache(model), make_prompt_cache(model)
    assert not {id(cache) for cache in first} & {id(cache) for cache in second}
    tiny.generate(model, first, 10, 2)
    assert all(cache.offset == 0 for cache in second)


def test_only_full_layers_of_a_windowed_model_are_packed(tiny: Any) -> None:
    """Windows stay the engine's own, full layers are packed, and the report says which is which."""
    model = tiny.gemma()
    applied = apply(model, tiny.config(model, "affine4-g32", packed=[2, 5]))
    caches = make_prompt_cache(model)
    expected = [RotatingKVCache, RotatingKVCache, PackedKVCache] * 2
    assert [type(cache) for cache in caches] == expected
    assert [layer.cache_class for layer in applied.layers] == [cls.__name__ for cls in expected]
    assert [layer.label for layer in applied.layers] == [None, None, "affine4-g32"] * 2
    assert (applied.packed, applied.kept) == (2, 4)
    tiny.generate(model, caches, 100, 10, 64)
    full = kv_slots(schedule(100, 10, 64)) * packed_slot_bytes(1, 64, 4, 32)
    window = 32 * 2 * 64 * 4
    assert held_bytes(caches) == 2 * full + 4 * window


def test_packing_a_window_is_refused_before_a_token(tiny: Any) -> None:
    """A plan that packs a RotatingKVCache is refused and leaves the model as it was."""
    model = tiny.gemma()
    with pytest.raises(MethodRefused, match="layer 0 keeps a RotatingKVCache"):
        apply(model, tiny.config(model, "affine4-g32"))
    assert "make_cache" not in vars(model)


def test_a_deep_copy_makes_its_own_planned_caches(tiny: Any) -> None:
    """The copy is planned too, and lives on when the original is gone."""
    model = tiny.llama()
    apply(model, tiny.config(model))
    duplicate = copy.deepcopy(model)
    expected = tiny.generate(model, None, 20, 4)
    del model
    gc.collect()
    assert [type(cache) for cache in duplicate.make_cache()] == [PackedKVCache] * 3
    assert tiny.generate(duplicate, None, 20, 4) == expected
    assert restore(duplicate)


def test_a_dropped_model_is_freed_at_once(tiny: Any) -> None:
    """The plan holds its model weakly: no reference cycle keeps the weights until a garbage collection."""
    model = tiny.llama(layers=1)
    apply(model, tiny.config(model))
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_applying_twice_replaces(tiny: Any) -> None:
    """The second plan stands alone, and one restore undoes both."""
    model = tiny.llama()
    apply(model, tiny.config(model, "affine4-g64"))
    apply(model, tiny.config(model, "affine8-g32", packed=[1]))
    first, second, third = make_prompt_cache(model)
    assert (type(first), second.key_codec.bits, type(third)) == (KVCache, 8, KVCache)
    assert restore(model)
    assert "make_cache" not in vars(model)
    assert [type(cache) for cache in make_prompt_cache(model)] == [KVCache] * 3
    assert not restore(model)


def test_a_plan_that_keeps_16_bit_restores_the_engines_own(tiny: Any) -> None:
    """fp16 after affine leaves no trace on the model."""
    model = tiny.llama()
    apply(model, tiny.config(model))
    applied = apply(model, tiny.config(model, "fp16"))
    assert (applied.packed, applied.kept) == (0, 3)
    assert [layer.cache_class for layer in applied.layers] == ["KVCache"] * 3
    assert "make_cache" not in vars(model)


def test_the_models_class_is_never_touched(tiny: Any) -> None:
    """Another model of the same class keeps the engine's own caches."""
    model, other = tiny.llama(), tiny.llama()
    before = type(model).__dict__["make_cache"]
    apply(model, tiny.config(model))
    assert type(model).__dict__["make_cache"] is before
    assert [type(cache) for cache in make_prompt_cache(other)] == [KVCache] * 3


def test_somebody_elses_make_cache_is_built_upon_and_given_back(tiny: Any) -> None:
    """A make_cache that was already on the instance supplies the kept layers, and restore puts it back."""
    model = tiny.llama()
    model.make_cache = mine = lambda: [RotatingKVCache(max_size=16), KVCache(), KVCache()]
    apply(model, tiny.config(model, packed=[1, 2]))
    apply(model, tiny.config(model, packed=[2]))
    assert [type(cache) for cache in make_prompt_cache(model)] == [RotatingKVCache, KVCache, PackedKVCache]
    assert restore(model)
    assert model.make_cache is mine


def test_a_class_without_make_cache_gets_the_engines_default_list(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mlx-lm would make one KVCache a layer, so do we on the layers that are kept."""
    model = tiny.llama()
    monkeypatch.delattr(type(model), "make_cache")
    apply(model, tiny.config(model, packed=[0]))
    assert [type(cache) for cache in make_prompt_cache(model)] == [PackedKVCache, KVCache, KVCache]


def test_prompt_caches_save_and_load(tiny: Any, short_folder: Any) -> None:
    """A saved packed prompt cache continues as if it had never been saved."""
    model = tiny.llama()
    apply(model, tiny.config(model))
    caches = make_prompt_cache(model)
    tiny.generate(model, caches, 40, 2)
    path = str(short_folder / "prompt.safetensors")
    engine.save_prompt_cache(path, caches)
    loaded = engine.load_prompt_cache(path)
    assert held_bytes(loaded) == held_bytes(caches)
    assert tiny.generate(model, loaded, 5, 6) == tiny.generate(model, caches, 5, 6)


def test_speculative_decoding_uses_planned_caches(tiny: Any) -> None:
    """Greedy speculation with planned caches on both models gives the tokens of plain greedy generation."""
    model, draft = tiny.llama(), tiny.llama(layers=1)
    apply(model, tiny.config(model, "affine8-g32"))
    apply(draft, tiny.config(draft, "affine8-g32"))
    prompt = mx.array([(7 * i + 3) % tiny.vocabulary for i in range(30)])
    made = [int(token) for token, _, _ in speculative_generate_step(prompt, model, draft, max_tokens=12)]
    assert made == tiny.generate(model, None, 30, 12)


def test_the_prefill_step_of_the_plan_is_told(tiny: Any) -> None:
    """It is the engine's argument, not a property of the caches."""
    model = tiny.llama()
    assert apply(model, tiny.config(model, prefill_step_size=512)).prefill_step_size == 512


def test_another_models_layer_count_is_refused(tiny: Any) -> None:
    """A plan for three caches does not go on a model with two."""
    plan = tiny.config(tiny.llama(layers=3))
    model = tiny.llama(layers=2)
    with pytest.raises(InvalidParams, match="for 3 caches and this model has 2") as caught:
        apply(model, plan)
    assert caught.value.field == "layer_count"


def test_another_models_widths_are_refused(tiny: Any) -> None:
    """Same number of layers, other heads: the plan's figures are not this model's."""
    model = tiny.llama(layers=1, heads=2, width=64)
    apply(model, tiny.config(model, packed_shapes=[[2, 64, 64]]))
    restore(model)
    two = tiny.llama(layers=2)
    apply(two, tiny.config(two, packed_shapes=[[2, 64, 64]]))
    apply(two, tiny.config(two, packed_shapes=[[2, 64, 64]] * 2))
    with pytest.raises(InvalidParams, match=r"layer 1 has .* = \(2, 64, 64\) and the plan was made for \(2, 64, 32\)"):
        apply(two, tiny.config(two, packed_shapes=[[2, 64, 64], [2, 64, 32]]))
    with pytest.raises(InvalidParams, match="made for another model") as caught:
        apply(model, tiny.config(model, packed_shapes=[[2, 128, 128]]))
    assert caught.value.field == "packed_shapes"
    assert "make_cache" not in vars(model)


def test_a_width_the_group_does_not_divide_is_refused(tiny: Any) -> None:
    """Head width 96 takes no group of 64."""
    model = tiny.llama(layers=1, width=96)
    with pytest.raises(MethodRefused, match="groups of 64 do not divide the key width 96"):
        apply(model, tiny.config(model))
    apply(model, tiny.config(model, "affine4-g32"))


def test_a_model_that_cannot_run_with_packed_caches_is_refused_with_the_engines_error(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal finds what a request would have died of, and the model stays as it was."""
    model = tiny.llama()
    attention = type(model.model.layers[0].self_attn)
    original = attention.__call__

    def reads_keys(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        out = original(self, x, mask, cache)
        return out + 0 * cache.keys.sum()

    monkeypatch.setattr(attention, "__call__", reads_keys)
    with pytest.raises(MethodRefused, match="cannot run with affine4-g64 caches: AttributeError: 'list'"):
        apply(model, tiny.config(model))
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"method": "nonesuch"}, MethodNotFound, "method"),
        ({"label": "affine7-g64"}, InvalidParams, "label"),
        ({"params": {"bits": 8, "group": 64}}, InvalidParams, "params"),
        ({"schema": "veloxquant.cache_config/2"}, InvalidParams, "schema"),
        ({"packed_layers": [0, 0]}, InvalidParams, "packed_layers"),
        ({"packed_layers": [3]}, InvalidParams, "packed_layers"),
        ({"packed_layers": [-1]}, InvalidParams, "plan"),
        ({"packed_layers": None}, InvalidParams, "plan"),
        ({"prefill_step_size": 0}, InvalidParams, "plan"),
        ({"packed_shapes": [[2, 64, 64]] * 2}, InvalidParams, "packed_shapes"),
    ],
)
def test_a_malformed_plan_is_refused_naming_the_field(tiny: Any, changes: Any, error: Any, field: str) -> None:
    """Each wrong field has a typed error with a way out, and nothing is put on the model."""
    model = tiny.llama()
    with pytest.raises(error) as caught:
        apply(model, tiny.config(model, **changes))
    assert (caught.value.field, bool(caught.value.hint)) == (field, True)
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize("model", [None, object(), ("model", "tokenizer")])
def test_what_is_no_model_is_refused(tiny: Any, model: Any) -> None:
    """The pair that mlx_lm.load returns is a common slip, and the hint names it."""
    with pytest.raises(InvalidParams, match="a loaded mlx-lm model is needed") as caught:
        apply(model, tiny.config(tiny.llama(layers=1)))
    assert caught.value.field == "model"
    with pytest.raises(InvalidParams):
        restore(model)


def test_a_plan_outlives_its_model_only_in_words(tiny: Any) -> None:
    """A shallow copy of a dropped model says what to do, rather than failing on a dead reference."""
    model = tiny.llama(layers=1)
    apply(model, tiny.config(model))
    planned = model.make_cache
    del model
    gc.collect()
    for left in (planned, copy.deepcopy(planned)):
        with pytest.raises(MethodRefused, match="is gone"):
            left()


@pytest.mark.parametrize("plan", [None, 4, "affine4-g64", [], {}, {"schema": 1}])
def test_what_is_no_plan_is_refused(tiny: Any, plan: Any) -> None:
    """Any object gives a typed error."""
    with pytest.raises(InvalidParams):
        apply(tiny.llama(layers=1), plan)


def test_the_rehearsal_allocates_nothing(tiny: Any) -> None:
    """Applying computes nothing: MLX's active memory is what it was."""
    model = tiny.llama()
    gc.collect()
    before = mx.get_active_memory()
    apply(model, tiny.config(model))
    gc.collect()
    assert mx.get_active_memory() == before

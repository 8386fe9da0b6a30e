"""Layers with parameters of their own: as a plan has them, as a config has them, as the method chooses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.methods import Calibration, LayerSensitivity, Method, Parameter, QualityPrior, Variant
from veloxquant.methods.guard import Guarded
from veloxquant.methods.registry import Loaded
from veloxquant.serve.apply import apply
from veloxquant.serve.builder import KVCacheBuilder
from veloxquant.serve.kv_config import KVCacheConfig

if TYPE_CHECKING:
    from pathlib import Path

BITS = Parameter(name="bits", kind="int", default=8, choices=(2, 4, 8))


class Mixed(Method):
    """Affine groups, 8 bits in the first packed layer and fewer in the others; "needy" needs a calibration."""

    name = "mixed"

    def variants(self) -> Any:
        """With and without a calibration, and one whose layers are alike."""
        return [Variant(method=self.name, label=label, params={"bits": 4}) for label in ("mixed", "needy")]

    def parameters(self) -> Any:
        """One."""
        return [BITS]

    def layer_params(self, variant: Variant, places: Any, calibration: Any) -> Any:
        """By order; the fewer bits are the calibration's first where there is one."""
        if variant.label == "needy" and calibration is None:
            raise MethodRefused("no calibration of this model", hint="run one")
        low = 4 if calibration is None else calibration.bits[0]
        return [{"bits": low if place.order else 8} for place in places]

    def refuses(self, variant: Variant, part: Any) -> Any:
        """Two bits are refused on narrow heads."""
        if variant.params["bits"] == 2 and part.key_width < 128:
            return "not_supported_by_engine", "2 bits need wide heads"
        return None

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A claim."""
        return QualityPrior(kl_mean=0.1, low=0.1, high=0.1, source="a test")

    def key_bits(self, variant: Variant, part: Any) -> float:
        """Scale and bias included."""
        return int(variant.params["bits"]) + 16 * part.key_itemsize / 64

    value_bits = key_bits

    def build(self, layer: Any, variant: Variant) -> Any:
        """A packed cache."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.packed import PackedKVCache

        bits = int(variant.params["bits"])
        return PackedKVCache(*(AffineCodec(w, bits, 64) for w in (layer.part.key_width, layer.part.value_width)))


@pytest.fixture
def loaded() -> Loaded:
    """A registry of that one method."""
    method = Guarded(Mixed(), Mixed().variants(), Mixed().parameters(), trusted=True)
    variants = tuple((method, variant) for variant in method.variants())
    return Loaded(methods=(method,), variants=variants, quarantined=(), fingerprint="")


def planned(tiny: Any, params: Any, **changes: Any) -> dict[str, Any]:
    """A plan for the three layers of the tiny llama."""
    config = tiny.config(tiny.llama()) | {"method": "mixed", "label": "mixed", "params": {"bits": 4}}
    return config | ({} if params is None else {"layer_params": params}) | changes


def bits_of(caches: Any) -> list[int]:
    """Of each layer's keys, None for the engine's own."""
    return [cache.key_codec.describe()["bits"] if hasattr(cache, "key_codec") else 0 for cache in caches]


def test_a_plans_layers_are_built_with_their_own_parameters(tiny: Any, loaded: Loaded) -> None:
    """And hold the bytes of these: 256 slots x 2 heads x 64 x 2 numbers of bits + 1 bits, in float32."""
    model = tiny.llama()
    applied = apply(model, planned(tiny, [{"bits": 8}, {"bits": 4}, {}]), methods=loaded)
    assert {layer.label for layer in applied.layers} == {"mixed"}
    caches = model.make_cache()
    assert bits_of(caches) == [8, 4, 4]
    tiny.generate(model, caches, 100, 4)
    assert [held_bytes(cache) for cache in caches] == [256 * 2 * 64 * 2 * (bits + 1) // 8 for bits in (8, 4, 4)]


def test_the_parameters_go_with_their_layers_whatever_the_order_in_the_plan(tiny: Any, loaded: Loaded) -> None:
    """They are parallel to packed_layers."""
    model = tiny.llama()
    apply(model, planned(tiny, [{"bits": 8}, {"bits": 4}], packed_layers=[2, 0]), methods=loaded)
    assert bits_of(model.make_cache()) == [4, 0, 8]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([{"bits": 8}], "1 layer_params for 3 packed_layers"),
        ([{"bits": 3}] * 3, "and not one of 2, 4, 8"),
        ([{"width": 4}] * 3, "none of its parameters"),
        (None, "the plan names none"),
    ],
)
def test_parameters_that_are_not_the_methods_are_refused(tiny: Any, loaded: Loaded, params: Any, message: str) -> None:
    """Before anything is changed, and naming the field; none at all where the method has them differ, too."""
    model = tiny.llama()
    with pytest.raises(InvalidParams, match=message) as caught:
        apply(model, planned(tiny, params), methods=loaded)
    assert caught.value.field == "layer_params"
    assert "make_cache" not in vars(model)


def test_a_layer_the_method_refuses_under_its_own_parameters_is_refused(tiny: Any, loaded: Loaded) -> None:
    """The method is asked about each layer as it is built."""
    with pytest.raises(MethodRefused, match="layer 1: 2 bits need wide heads"):
        apply(tiny.llama(), planned(tiny, [{"bits": 8}, {"bits": 2}, {}]), methods=loaded)


def test_a_config_lets_the_method_choose(tiny: Any, loaded: Loaded) -> None:
    """By the layers that are packed, and by a calibration where one is given."""
    model, config = tiny.llama(), KVCacheConfig(method="mixed", params={"bits": 4})
    assert bits_of(KVCacheBuilder.for_model(model, config, methods=loaded)) == [8, 4, 4]
    some = KVCacheConfig(method="mixed", params={"bits": 4}, layers=(1, 2))
    assert bits_of(KVCacheBuilder.for_model(model, some, methods=loaded)) == [0, 8, 4]
    found = KVCacheBuilder.for_model(model, config, methods=loaded, calibration=calibration(8))
    assert bits_of(found) == [8, 8, 8]


def test_layers_refused_under_their_own_parameters_keep_the_engines_cache(tiny: Any, loaded: Loaded) -> None:
    """The first is packed, and the parameters are chosen anew for what is left."""
    config = KVCacheConfig(method="mixed", params={"bits": 4})
    found = KVCacheBuilder.for_model(tiny.llama(), config, methods=loaded, calibration=calibration(2))
    assert bits_of(found) == [8, 0, 0]


def calibration(bits: int) -> Calibration:
    """One that says these bits."""
    layer = LayerSensitivity(index=0, key=((0.1,),), value=((0.1,),))
    return Calibration(
        model_id="m", architecture="llama", config_hash="h", tokens=1, text="t", bits=(bits,), layers=(layer,)
    )


def test_a_plan_needs_no_calibration_where_it_is_applied(tiny: Any, loaded: Loaded) -> None:
    """It has chosen already."""
    model = tiny.llama()
    plan = planned(tiny, [{"bits": 8}, {"bits": 4}, {"bits": 8}], label="needy")
    apply(model, plan, methods=loaded)
    assert bits_of(model.make_cache()) == [8, 4, 8]
    with pytest.raises(MethodRefused, match="no calibration"):
        apply(model, planned(tiny, None, label="needy"), methods=loaded)


def test_a_plan_as_a_config_builds_the_same_caches(tiny: Any, loaded: Loaded, short_folder: Path) -> None:
    """Through TOML and back, in any order of layers."""
    plan = planned(tiny, [{"bits": 4}, {"bits": 8}], packed_layers=[2, 1])
    config = KVCacheConfig.from_plan(plan)
    assert (config.layers, config.layer_params) == ((1, 2), ({"bits": 8}, {"bits": 4}))
    file = short_folder / "kv.toml"
    file.write_text(config.to_toml())
    again = KVCacheConfig.from_toml(file)
    assert (again, hash(again)) == (config, hash(config))
    assert bits_of(KVCacheBuilder.for_model(tiny.llama(), again, methods=loaded)) == [0, 8, 4]


@given(st.lists(st.dictionaries(st.sampled_from(("bits", "group")), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_config_with_parameters_by_layer_survives_its_toml(params: Any) -> None:
    """Empty ones too."""
    config = KVCacheConfig(method="mixed", layers=tuple(range(len(params))), layer_params=tuple(params))
    assert KVCacheConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize(
    ("layers", "params"),
    [(None, [{}]), ((0, 1), [{}]), ((0,), "a"), ((0,), [4]), ((0,), [{"bits": None}]), ((0,), [{"": 4}])],
)
def test_a_config_names_each_layer_that_has_parameters(layers: Any, params: Any) -> None:
    """One mapping a layer, of plain values."""
    with pytest.raises(InvalidParams):
        KVCacheConfig(method="mixed", layers=layers, layer_params=params)

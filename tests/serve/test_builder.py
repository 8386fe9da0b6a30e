"""The fluent builder: what each setter refuses, in any order of calls, and what it builds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from veloxquant.errors import InvalidParams, MethodNotFound, MethodRefused
from veloxquant.methods import Method, Parameter, Variant
from veloxquant.methods.checks import check_parameters, check_variants
from veloxquant.methods.guard import Guarded
from veloxquant.methods.registry import Loaded
from veloxquant.serve.builder import KVCacheBuilder, KVCacheConfig

HUGE = 10**400


class Standalone:
    """What a stand-in builds: remembers what it was built from."""

    append_key = append_value = append = attend = memory_bytes = __len__ = lambda *_: 0

    def __init__(self, head_dim: int, variant: Variant) -> None:
        self.head_dim, self.variant = head_dim, variant


class Sketched(Method):
    """A method with every parameter that has a setter of its own."""

    name = "sketched"

    def variants(self) -> Any:
        """Two and three bits."""
        return [Variant(method=self.name, label=f"sketched{bits}", params={"bits": bits}) for bits in (2, 3)]

    def parameters(self) -> Any:
        """Those of a rotation with a sketch, and one that has no setter."""
        return [
            Parameter(name="bits", kind="int", default=3, low=1, high=8),
            Parameter(name="outlier_bits", kind="int", low=1, high=8),
            Parameter(name="outlier_channels", kind="int", default=0, low=0),
            Parameter(name="jl_dim", kind="int", low=1),
            Parameter(name="seed", kind="int", default=0, low=0),
            Parameter(name="norm", kind="str", default="rms", choices=("rms", "max")),
        ]

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """Not for a width of 7."""
        if head_dim == 7:
            raise MethodRefused("seven is too narrow", hint="use eight", field="head_dim")
        return Standalone(head_dim, variant)


class Grouped(Sketched):
    """A method with groups and a width of bits that need not be whole; it only serves."""

    name = "grouped"
    build_standalone = Method.build_standalone

    def parameters(self) -> Any:
        """Bits may be 2.5."""
        return [
            Parameter(name="bits", kind="float", default=3.0, low=1, high=8),
            Parameter(name="group", kind="int", default=64, choices=(32, 64)),
        ]


def loaded(*methods: Method) -> Loaded:
    """A registry of stand-ins, guarded as any method is."""
    guarded = [Guarded(one, check_variants(one), check_parameters(one), trusted=True) for one in methods]
    pairs = tuple((one, variant) for one in guarded for variant in one.variants())
    return Loaded(methods=tuple(guarded), variants=pairs, quarantined=(), fingerprint="stand-ins")


@pytest.fixture
def builder() -> KVCacheBuilder:
    """One that knows the stand-ins."""
    return KVCacheBuilder(methods=loaded(Sketched(), Grouped()))


def test_the_chain_builds_what_was_said(builder: KVCacheBuilder) -> None:
    """Every setter reaches the method under its parameter's name."""
    built = (
        builder.with_method("sketched")
        .with_head_dim(80)
        .with_bit_width(inlier=4, outlier=6)
        .with_outlier_channels(8)
        .with_jl_dim(40)
        .with_seed(11)
        .with_parameter("norm", "max")
        .build()
    )
    assert built.head_dim == 80
    assert built.variant.params == {
        "bits": 4,
        "outlier_bits": 6,
        "outlier_channels": 8,
        "jl_dim": 40,
        "seed": 11,
        "norm": "max",
    }


SETS = {
    "method": lambda b: b.with_method("sketched"),
    "head": lambda b: b.with_head_dim(64),
    "bits": lambda b: b.with_bit_width(inlier=2),
    "jl": lambda b: b.with_jl_dim(32),
    "seed": lambda b: b.with_seed(5),
}


def test_order_of_calls_does_not_matter(builder: KVCacheBuilder) -> None:
    """All 120 orders of five setters are one config and one label."""
    configs, labels = set(), set()
    for order in itertools.permutations(SETS.values()):
        one = builder.copy()
        for step in order:
            assert step(one) is one
        configs.add(one.config())
        labels.add(one.build().variant.label)
    assert configs == {
        KVCacheConfig(
            method="sketched",
            params={"bits": 2, "outlier_channels": 0, "jl_dim": 32, "seed": 5, "norm": "rms"},
            head_dim=64,
        )
    }
    assert labels == {"sketched-bits.2-jl_dim.32-seed.5"}


def test_what_a_variant_has_is_that_variant(builder: KVCacheBuilder) -> None:
    """So that its prior and its records are those of what is built; defaults count when nothing is set."""
    builder.with_method("sketched").with_head_dim(64)
    assert builder.build().variant.label == "sketched3"
    assert builder.with_bit_width(2).with_seed(0).build().variant == Variant(
        method="sketched", label="sketched2", params={"bits": 2}
    )


def test_building_twice_gives_two_caches(builder: KVCacheBuilder) -> None:
    """A builder is not used up, and a later setting does not reach what was built."""
    builder.with_method("sketched").with_head_dim(64).with_bit_width(inlier=4)
    first, second = builder.build(), builder.build()
    assert first is not second
    builder.with_bit_width(inlier=5)
    assert (first.variant.params["bits"], builder.build().variant.params["bits"]) == (4, 5)


def test_a_copy_changes_by_itself(builder: KVCacheBuilder) -> None:
    """Branches of one base do not see each other."""
    base = builder.with_method("sketched").with_head_dim(64)
    twin = base.copy().with_head_dim(32).with_seed(1)
    assert (base.build().head_dim, twin.build().head_dim) == (64, 32)
    assert (base.config().params, twin.config().params["seed"]) == ({"bits": 3}, 1)


def test_none_is_the_methods_default(builder: KVCacheBuilder) -> None:
    """A width of outliers left out is taken back; a parameter of None is only taken where it is the default."""
    builder.with_method("sketched").with_bit_width(4, 6).with_bit_width(4).with_jl_dim(8)
    builder.with_parameter("jl_dim", None)
    assert dict(builder.config().params) == {"bits": 4, "outlier_channels": 0, "seed": 0, "norm": "rms"}
    with pytest.raises(InvalidParams, match="seed is None, and not a whole number"):
        builder.with_parameter("seed", None)


@pytest.mark.parametrize("method_first", [True, False])
@pytest.mark.parametrize(
    ("field", "setter"),
    [
        *(("head_dim", lambda b, v=v: b.with_head_dim(v)) for v in (0, -64, True, 64.0, "64", None, 2**16 + 1, HUGE)),
        *(
            ("bits", lambda b, v=v: b.with_bit_width(inlier=v))
            for v in (0, -1, True, "2", None, math.nan, math.inf, 257, HUGE, [2])
        ),
        *(("outlier_bits", lambda b, v=v: b.with_bit_width(2, v)) for v in (0, False, "4", math.nan, -math.inf)),
        *(("outlier_channels", lambda b, v=v: b.with_outlier_channels(v)) for v in (-1, True, 1.0, None, HUGE)),
        *(("jl_dim", lambda b, v=v: b.with_jl_dim(v)) for v in (0, True, 64.0, "64", None, HUGE)),
        *(("seed", lambda b, v=v: b.with_seed(v)) for v in (-1, True, 0.0, None, 2**53 + 1, HUGE)),
        *(("group", lambda b, v=v: b.with_group_size(v)) for v in (0, True, 64.0, "64", None, HUGE)),
        *(("norm", lambda b, v=v: b.with_parameter("norm", v)) for v in (math.nan, [], {}, b"rms", HUGE, "\ud800")),
        *(("params", lambda b, v=v: b.with_parameter(v, 1)) for v in ("", None, 4, "\ud800", [])),
        *(("method", lambda b, v=v: b.with_method(v)) for v in ("", None, 4, "Sketched", "a b", ["sketched"])),
    ],
)
def test_each_setter_refuses_at_once_what_no_method_takes(
    builder: KVCacheBuilder, field: str, setter: Any, *, method_first: bool
) -> None:
    """The error names the field, and the builder stays as it was."""
    builder.with_head_dim(16).with_bit_width(inlier=4)
    if method_first:
        builder.with_method("sketched")
    with pytest.raises(InvalidParams) as caught:
        setter(builder)
    assert caught.value.field == field
    assert caught.value.hint
    built = builder.with_method("sketched").build()
    assert (built.head_dim, built.variant.label) == (16, "sketched-bits.4")


@pytest.mark.parametrize(
    ("method", "field", "setter", "has"),
    [
        ("sketched", "group", lambda b: b.with_group_size(64), "bits, outlier_bits, outlier_channels, jl_dim, seed"),
        ("grouped", "jl_dim", lambda b: b.with_jl_dim(64), "it has: bits, group"),
        ("grouped", "seed", lambda b: b.with_seed(1), "it has: bits, group"),
        ("grouped", "outlier_bits", lambda b: b.with_bit_width(2, 4), "it has: bits, group"),
        ("grouped", "outlier_bits", lambda b: b.with_parameter("outlier_bits", None), "it has: bits, group"),
        ("grouped", "outlier_channels", lambda b: b.with_outlier_channels(0), "it has: bits, group"),
        ("grouped", "window", lambda b: b.with_parameter("window", 4), "it has: bits, group"),
    ],
)
def test_a_field_the_method_lacks_is_refused_as_soon_as_both_are_known(
    builder: KVCacheBuilder, method: str, field: str, setter: Any, has: str
) -> None:
    """By name, with the names there are, whichever came first; the other method still can be chosen."""
    early = builder.copy().with_method(method)
    late = setter(builder.copy())
    for call in (lambda: setter(early), lambda: late.with_method(method)):
        with pytest.raises(InvalidParams, match=f"method {method} has no parameter '{field}'") as caught:
            call()
        assert caught.value.field == field
        assert has in caught.value.hint
    assert early.config().method == method
    with pytest.raises(InvalidParams, match="no method is set"):
        late.config()


def test_values_of_the_chosen_method_are_its_own_matter(builder: KVCacheBuilder) -> None:
    """2.5 bits are possible for one method and not for another; 9 are for neither; groups are a choice."""
    half = builder.copy().with_bit_width(inlier=2.5)
    assert half.copy().with_method("grouped").config().params == {"bits": 2.5, "group": 64}
    with pytest.raises(InvalidParams, match=r"bits is 2\.5, and not a whole number"):
        half.with_method("sketched")
    with pytest.raises(InvalidParams, match="bits is 9, above 8"):
        builder.copy().with_method("sketched").with_bit_width(inlier=9)
    with pytest.raises(InvalidParams, match="group is 48, and not one of 32, 64"):
        builder.copy().with_group_size(48).with_method("grouped")


def test_what_is_missing_is_named(builder: KVCacheBuilder) -> None:
    """A method for everything, and a head width for a standalone cache; a config needs none."""
    for call in (builder.build, builder.config):
        with pytest.raises(InvalidParams, match="no method is set") as caught:
            call()
        assert caught.value.field == "method"
    with pytest.raises(InvalidParams, match="needs the width of its head") as caught:
        builder.with_method("sketched").build()
    assert caught.value.field == "head_dim"
    assert builder.config() == KVCacheConfig(method="sketched", params={"bits": 3})


def test_the_methods_own_refusals_come_through(builder: KVCacheBuilder) -> None:
    """With the reason and the next step; a method that only serves says so."""
    with pytest.raises(MethodNotFound, match="no method 'nonesuch' is ready") as missing:
        builder.with_method("nonesuch")
    assert "sketched" in missing.value.hint
    with pytest.raises(MethodRefused, match="at width 7: seven is too narrow") as narrow:
        builder.with_method("sketched").with_head_dim(7).build()
    assert (narrow.value.hint, narrow.value.field) == ("use eight", "head_dim")
    with pytest.raises(MethodRefused, match="grouped builds no standalone cache"):
        builder.with_method("grouped").build()


def test_without_a_registry_the_installed_methods_are_used() -> None:
    """The same plugins that plans are made from."""
    config = KVCacheBuilder().with_method("affine").with_bit_width(inlier=4).with_group_size(32).config()
    assert config == KVCacheConfig(method="affine", params={"bits": 4, "group": 32})
    assert KVCacheBuilder().with_method("affine").config().params == {"bits": 8, "group": 64}
    assert KVCacheBuilder().with_method("fp16").config().params == {}
    with pytest.raises(InvalidParams, match="method fp16 has no parameter 'bits'") as caught:
        KVCacheBuilder().with_bit_width(inlier=4).with_method("fp16")
    assert caught.value.hint == "it has none"

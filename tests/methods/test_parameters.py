"""From what a user sets to a Variant: names, values, defaults and labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import InvalidParams
from veloxquant.methods import Method, Parameter, Variant
from veloxquant.methods.checks import NAME
from veloxquant.methods.parameters import check_given, names_of, variant_for

BITS = Parameter(name="bits", kind="int", default=4, low=1, high=8)
SKETCH = Parameter(name="jl_dim", kind="int", low=1)
SHARE = Parameter(name="share", kind="float", default=0.5, low=0, high=1)
MODE = Parameter(name="mode", kind="str", default="fast", help="how it is done")
SIGNED = Parameter(name="signed", kind="bool", default=False)
ALL = (BITS, SKETCH, SHARE, MODE, SIGNED)


def method(simple: Any, parameters: Any = ALL, variants: Any = ()) -> Any:
    """A method with these parameters, whose variants have these parameter sets."""
    offered = [Variant(method="simple", label=f"simple-v{at}", params=params) for at, params in enumerate(variants)]
    functions = {"parameters": lambda _: parameters, "variants": lambda _: offered}
    return type("Inner", (simple,), functions)()


def test_a_set_that_a_variant_has_is_that_variant(simple: Any) -> None:
    """Its label, prior and records count; defaults count on both sides, and None is the default."""
    one = method(simple, variants=[{"bits": 2}, {"bits": 4, "share": 0.5, "mode": "fast", "signed": False}])
    assert variant_for(one, {}).label == "simple-v1"
    assert variant_for(one, {"bits": 4, "share": 0.5}).label == "simple-v1"
    assert variant_for(one, {"bits": 2, "jl_dim": None}) is one.variants()[0]
    assert variant_for(one, {"bits": 2, "mode": "fast"}).params == {"bits": 2}


def test_any_other_set_is_a_variant_of_its_own_with_every_value(simple: Any) -> None:
    """The label names what differs from the default; a parameter without a value is left out."""
    one = method(simple, variants=[{"bits": 2}])
    made = variant_for(one, {"signed": True, "bits": 3, "share": 1})
    assert made.label == "simple-bits.3-share.1.0-signed.true"
    assert made.params == {"bits": 3, "share": 1.0, "mode": "fast", "signed": True}
    assert type(made.params["share"]) is float
    assert variant_for(one, {}).label == "simple"


@pytest.mark.parametrize(
    ("given_values", "name", "message"),
    [
        ({"bits": 0}, "bits", "below 1"),
        ({"bits": 9}, "bits", "above 8"),
        ({"bits": True}, "bits", "not a whole number"),
        ({"bits": 4.0}, "bits", "not a whole number"),
        ({"bits": "4"}, "bits", "not a whole number"),
        ({"bits": None}, "bits", "not a whole number"),
        ({"share": math.nan}, "share", "not a number"),
        ({"mode": 1}, "mode", "not a word"),
        ({"signed": 1}, "signed", "not true or false"),
        ({"group": 32}, "group", "method simple has no parameter 'group'"),
    ],
)
def test_what_a_parameter_does_not_take_is_refused_by_name(
    simple: Any, given_values: Any, name: str, message: str
) -> None:
    """And an unknown name is answered with the names there are."""
    with pytest.raises(InvalidParams, match=message) as caught:
        variant_for(method(simple, variants=[{"bits": 2}]), given_values)
    assert caught.value.field == name
    if name == "group":
        assert caught.value.hint == "it has: bits, jl_dim, share, mode, signed"


def test_a_method_without_declared_parameters_is_chosen_among_its_variants(simple: Any) -> None:
    """What leaves one variant is enough; what leaves several, or none, is refused with their labels."""
    one = method(simple, (), [{"bits": 2, "group": 32}, {"bits": 4, "group": 32}, {"bits": 4, "group": 64}])
    assert names_of(one) == ("bits", "group")
    assert variant_for(one, {"bits": 2}).label == "simple-v0"
    assert variant_for(one, {"bits": 4, "group": 64}).label == "simple-v2"
    with pytest.raises(InvalidParams, match="2 of the variants of method simple agree with bits = 4") as caught:
        variant_for(one, {"bits": 4})
    assert (caught.value.field, "simple-v1, simple-v2" in caught.value.hint) == ("group", True)
    with pytest.raises(InvalidParams, match="3 of the variants"):
        variant_for(one, {})
    with pytest.raises(InvalidParams, match="none of the variants"):
        variant_for(one, {"bits": 2, "group": 64})
    with pytest.raises(InvalidParams, match="bits is 3, and not one of 2, 4"):
        variant_for(one, {"bits": 3})
    with pytest.raises(InvalidParams, match=r"bits is 4\.0"):
        variant_for(one, {"bits": 4.0})


def test_what_only_variants_name_stays_while_a_parameter_is_set(simple: Any) -> None:
    """One with eight bits in all its variants has them with any share; where variants differ it must be said."""
    one = method(simple, [SHARE], [{"bits": 8}, {"bits": 8, "share": 0.25}])
    assert variant_for(one, {}).label == "simple-v0"
    assert variant_for(one, {"share": 0.25}).label == "simple-v1"
    made = variant_for(one, {"share": 0.75})
    assert made.params == {"bits": 8, "share": 0.75}
    assert variant_for(one, {"bits": 8, "share": 0.75}) == made
    two = method(simple, [SHARE], [{"bits": 8}, {"bits": 4}])
    assert variant_for(two, {"bits": 4, "share": 0.75}).params == {"bits": 4, "share": 0.75}
    with pytest.raises(InvalidParams, match="2 of the variants"):
        variant_for(two, {"share": 0.75})


def test_the_only_variant_needs_no_parameters(simple: Any) -> None:
    """And one that has none takes none."""
    one = method(simple, (), [{}])
    assert variant_for(one, {}).label == "simple-v0"
    with pytest.raises(InvalidParams, match="no parameter 'bits'") as caught:
        check_given(one, {"bits": 8})
    assert caught.value.hint == "it has none"


def test_a_plain_label_that_a_variant_has_is_not_used_twice(simple: Any) -> None:
    """A digest stands in where the method itself calls another set so."""
    one = method(simple, [BITS], [{"bits": 2}])
    one.variants()[0] = taken = Variant(method="simple", label="simple-bits.3", params={"bits": 2})
    assert variant_for(one, {"bits": 2}) is taken
    assert variant_for(one, {"bits": 3}).label not in ("simple-bits.3", variant_for(one, {"bits": 5}).label)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(-(2**53), 2**53),
        "a1": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "word": st.text(),
        "worda": st.text("abc_.-"),
        "B": st.booleans(),
    },
)


@given(VALUES, VALUES, st.sampled_from(["m", "m" * 64]))
def test_labels_are_valid_and_as_unlike_as_the_sets_they_name(first: Any, second: Any, name: str) -> None:
    """Two sets have one label exactly when they are equal, whatever the values."""
    parameters = [
        Parameter(name="a", kind="int"),
        Parameter(name="a1", kind="int", default=0),
        Parameter(name="x", kind="float"),
        Parameter(name="word", kind="str", default=""),
        Parameter(name="worda", kind="str"),
        Parameter(name="B", kind="bool"),
    ]
    one = method(type("Named", (Method,), {"name": name}), parameters, [{"a": 10**9 + 7}])
    left, right = variant_for(one, first), variant_for(one, second)
    assert NAME.fullmatch(left.label)
    assert variant_for(one, dict(reversed(first.items()))) == left
    assert (left.label == right.label) == (left.params == right.params)

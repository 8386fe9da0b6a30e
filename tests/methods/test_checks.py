"""What a plugin may return, and what is refused with the name of the figure."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from veloxquant.errors import MethodRefused
from veloxquant.methods import Method, Parameter, QualityPrior, Variant
from veloxquant.methods.checks import check_figures, check_parameters, check_returned, check_variants

V = Variant(method="simple", label="simple8")
GOOD_PRIOR = QualityPrior(kl_mean=0.1, low=0.0, high=0.2, source="a test")


def answering(simple: Any, **answers: Any) -> Method:
    """A sound method, except that the named functions return what is given."""
    functions = {name: (lambda *_, answer=answer: answer) for name, answer in answers.items()}
    method: Method = type("Answering", (simple,), functions)()
    return method


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "NoneType, not a list"),
        ("affine", "type str, not a list"),
        ({}, "type dict, not a list"),
        ([None], "NoneType among its methods"),
        ([Method], "the class Method among its methods"),
        ([Method()], "the name '' does not match"),
        ([Method() for _ in range(33)], "33 methods; at most 32"),
    ],
)
def test_the_hook_returns_a_list_of_method_objects(returned: Any, message: str) -> None:
    """Anything else says what it was."""
    with pytest.raises(MethodRefused, match=message):
        check_returned(returned)


@pytest.mark.parametrize("name", ["", "Simple", "-simple", "a b", "a/b", "x" * 65, "ünder", "a\n", 7, None])
def test_bad_names_are_refused(simple: Any, name: Any) -> None:
    """Lower case letters, digits, dot, dash and underscore, 64 at most: they become file names and labels."""
    with pytest.raises(MethodRefused, match="name"):
        check_returned([type("Named", (simple,), {"name": name})()])


@pytest.mark.parametrize(
    "attributes", [{"batchable": 1}, {"version": ""}, {"summary": None}, {"fused_attention": "no"}]
)
def test_attributes_have_their_types(simple: Any, attributes: Any) -> None:
    """Flags are booleans and texts are text; the version is not empty."""
    with pytest.raises(MethodRefused, match=next(iter(attributes))):
        check_returned([type("Odd", (simple,), attributes)()])


def test_one_plugin_offers_a_name_once(simple: Any) -> None:
    """Two methods of one name in one plugin are a mistake of that plugin."""
    with pytest.raises(MethodRefused, match="method name 'simple' is used twice"):
        check_returned([simple(), simple()])


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (None, "NoneType, not a list"),
        ("simple8", "type str, not a list"),
        (iter([V]), "not a list"),
        ([], "returned 0; 1 to 64"),
        ([msgspec.structs.replace(V, label=f"s{i}") for i in range(65)], "returned 65"),
        (["simple8"], "type str, not only Variants"),
        ([V, V], "label 'simple8' is used twice"),
        ([Variant(method="other", label="simple8")], "says it is of 'other'"),
        ([Variant(method="simple", label="")], "label '' does not match"),
        ([Variant(method="simple", label=8)], "label 8 does not match"),  # type: ignore[arg-type]
        ([Variant(method="simple", label="s", params={"bits": math.nan})], "bits is nan"),
        ([Variant(method="simple", label="s", params={"bits": [4]})], r"bits is \[4\]"),  # type: ignore[dict-item]
        ([Variant(method="simple", label="s", params={8: 8})], "mapping by name"),  # type: ignore[dict-item]
        ([Variant(method="simple", label="s", params=None)], "mapping by name"),  # type: ignore[arg-type]
    ],
)
def test_variants_are_few_well_named_and_unlike(simple: Any, variants: Any, message: str) -> None:
    """Every variant is a Variant of its method with a label of its own and plain parameters."""
    with pytest.raises(MethodRefused, match=message):
        check_variants(answering(simple, variants=variants))


@pytest.mark.parametrize("what", ["key_bits", "value_bits"])
@pytest.mark.parametrize(
    "bits", [math.nan, math.inf, -1, -0.5, 257, "8", None, True, pytest.param(10**5000, id="huge")]
)
def test_impossible_bits_are_refused(simple: Any, what: str, bits: Any) -> None:
    """NaN, infinite, negative, absurd or not a number."""
    with pytest.raises(MethodRefused, match=f"simple simple8: {what}"):
        check_figures(answering(simple, **{what: bits}), [V])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"fixed_bytes": -1}, "fixed_bytes"),
        ({"fixed_bytes": 1.5}, "fixed_bytes"),
        ({"fixed_bytes": 10**5000}, "fixed_bytes"),
        ({"slot_step": 0}, "slot_step"),
        ({"slot_step": 2**17}, "slot_step"),
        ({"slots": -1}, r"slots\(\) returned -1, not 0 to 65537 after 1 tokens"),
        ({"slots": 64.0}, r"slots\(\) returned 64.0"),
        ({"slots": True}, r"slots\(\) returned True"),
        ({"slots": 2**17}, r"slots\(\) returned 131072, not 0 to 65537"),
        ({"unpack_cost": -1.0}, "unpack_cost"),
        ({"unpack_cost": math.nan}, "unpack_cost"),
        ({"unpack_bytes": -1.0}, "unpack_bytes"),
        ({"unpack_bytes": math.inf}, "unpack_bytes"),
        ({"engine_settings": [4]}, "engine_settings"),
        ({"engine_settings": {"kv_bits": math.inf}}, "kv_bits is inf"),
        ({"refuses": "width"}, "refuses"),
        ({"refuses": ("too_wide", "it is")}, "'too_wide'; known"),
        ({"refuses": ("width_not_divisible", " ")}, "refuses"),
        ({"quality_prior": 0.1}, "not a QualityPrior"),
        ({"quality_prior": msgspec.structs.replace(GOOD_PRIOR, low=0.15)}, "0 <= low <= kl_mean <= high"),
        ({"quality_prior": msgspec.structs.replace(GOOD_PRIOR, high=math.nan)}, "0 <= low <= kl_mean <= high"),
        ({"quality_prior": msgspec.structs.replace(GOOD_PRIOR, low=-1)}, "0 <= low <= kl_mean <= high"),
        ({"quality_prior": msgspec.structs.replace(GOOD_PRIOR, source="")}, "names no source"),
        ({"quality_prior": msgspec.structs.replace(GOOD_PRIOR, perplexity_delta=math.nan)}, "perplexity_delta"),
    ],
)
def test_impossible_answers_are_refused(simple: Any, answers: Any, message: str) -> None:
    """Each names the figure."""
    with pytest.raises(MethodRefused, match=message):
        check_figures(answering(simple, **answers), [V])


def test_a_wider_source_number_never_stores_less(simple: Any) -> None:
    """Bits that fall when the engine's numbers go from 16 to 32 bits are a mistake of formula."""

    class Falling(simple):  # type: ignore[misc]
        def key_bits(self, variant: Any, part: Any) -> float:
            return 16.0 / float(part.key_itemsize)

    with pytest.raises(MethodRefused, match="stores less for 32-bit"):
        check_figures(Falling(), [V])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (lambda tokens: None if tokens < 1000 else 1024, "at some lengths and returns None at others"),
        (lambda tokens: 4096 if tokens < 1000 else 1024, "fewer slots for more tokens"),
    ],
)
def test_slots_are_counted_at_all_lengths_and_never_fall(simple: Any, slots: Any, message: str) -> None:
    """A longer context never stores less; a bounded cache stays at its bound."""
    inner = type("Inner", (simple,), {"slots": lambda *asked: slots(asked[-1])})()
    with pytest.raises(MethodRefused, match=message):
        check_figures(inner, [V])
    bounded = type("Inner", (simple,), {"slots": lambda *asked: min(asked[-1], 512)})()
    check_figures(bounded, [V])


def test_divergence_by_length_never_falls(simple: Any) -> None:
    """More tokens lose no less; each answer is checked as the prior is."""

    def telling(figure: Any) -> Any:
        def quality_at(self: Any, variant: Any, tokens: int) -> Any:
            return msgspec.structs.replace(GOOD_PRIOR, low=0.0, kl_mean=figure(tokens), high=10.0)

        return type("Inner", (simple,), {"quality_at": quality_at})()

    check_figures(telling(lambda tokens: min(9.0, tokens / 1000)), [V])
    with pytest.raises(MethodRefused, match=r"quality_at\(\) claims less divergence for more tokens"):
        check_figures(telling(lambda tokens: 1 / tokens), [V])
    with pytest.raises(MethodRefused, match=r"quality_at\(\) must hold 0 <= low"):
        check_figures(telling(lambda _: 11.0), [V])


def test_a_method_that_forgets_what_it_said_is_refused(simple: Any) -> None:
    """Planning is pure: the same question has the same answer."""

    class Drifting(simple):  # type: ignore[misc]
        calls = 0

        def fixed_bytes(self, variant: Any, part: Any) -> int:
            Drifting.calls += 1
            return Drifting.calls

    with pytest.raises(MethodRefused, match="two equal questions had different answers"):
        check_figures(Drifting(), [V])


def test_a_method_may_refuse_every_sample_layer(simple: Any) -> None:
    """A method for one special width is sound, and its figures are not asked where it refuses."""
    refusing = answering(simple, refuses=("not_supported_by_engine", "no"), key_bits=math.nan)
    check_figures(refusing, [V])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (None, "NoneType, not a list"),
        ("bits", "type str, not a list"),
        (["bits"], "'bits', not only named Parameters"),
        ([Parameter(name="", kind="int")], "not only named Parameters"),
        ([Parameter(name="jl-dim", kind="int")], "not only named Parameters"),
        ([Parameter(name="bits", kind="int", default=9, high=8)], "the default of bits is 9, above 8"),
        ([Parameter(name="bits", kind="int", default=True)], "the default of bits is True, and not a whole number"),
        ([Parameter(name="group", kind="int", default=16, choices=(32, 64))], "16, and not one of 32, 64"),
        ([Parameter(name="bits", kind="int")] * 2, "parameter 'bits' is used twice"),
    ],
)
def test_parameters_are_named_unlike_and_take_their_own_defaults(simple: Any, parameters: Any, message: str) -> None:
    """A default that the parameter refuses would make a method that nobody can build."""
    with pytest.raises(MethodRefused, match=message):
        check_parameters(answering(simple, parameters=parameters))

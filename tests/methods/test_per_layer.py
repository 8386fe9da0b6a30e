"""Parameters that differ from layer to layer: asked once for all packed layers, checked, filled in."""

from __future__ import annotations

from typing import Any

import pytest

from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.methods import Calibration, LayerSensitivity, Parameter, Variant
from veloxquant.methods.checks import sample_part
from veloxquant.methods.guard import Guarded
from veloxquant.methods.per_layer import NOT_CALIBRATED, for_layer, layer_params, places_of

PART = sample_part(64, 2)
PARTS = {5: PART, 2: PART, 9: PART}
BITS = Parameter(name="bits", kind="int", default=4, low=2, high=8)
SENSITIVE = LayerSensitivity(index=2, key=((0.2, 0.1),), value=((0.3, 0.1),))


def calibration(**changes: Any) -> Calibration:
    """A small one: one head of one layer, at 2 and at 4 bits."""
    fields = {"bits": (2, 4), "layers": (SENSITIVE,), "tokens": 100, "text": "a test"} | changes
    return Calibration(model_id="org/model", architecture="llama", config_hash="0", **fields)


def guarded(simple: Any, answer: Any, *, trusted: bool = True) -> tuple[Guarded, Variant]:
    """A method with one parameter that answers `layer_params` so: with a value, or a function of the question."""

    def said(self: Any, variant: Any, places: Any, calibration: Any) -> Any:
        return answer(places, calibration) if callable(answer) else answer

    inner = type("Inner", (simple,), {"layer_params": said})()
    return Guarded(inner, inner.variants(), [BITS], trusted=trusted), inner.variants()[0]


def test_the_layers_are_told_in_the_order_of_the_cache_list() -> None:
    """Each knows its index, its place among the packed ones, how many there are, and its own widths."""
    assert [(p.index, p.order, p.count, p.part) for p in places_of(PARTS)] == [
        (2, 0, 3, PART),
        (5, 1, 3, PART),
        (9, 2, 3, PART),
    ]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_method_gives_each_layer_its_own_parameters(simple: Any, trusted: Any) -> None:
    """The layer's are laid over the variant's; label and method stay."""
    method, variant = guarded(
        simple, lambda places, _: [{"bits": 2 + place.order} for place in places], trusted=trusted
    )
    chosen = layer_params(method, variant, PARTS, None)
    assert chosen == ({"bits": 2}, {"bits": 3}, {"bits": 4})
    own = Variant(method="simple", label="simple8", params={"bits": 8, "group": 64})
    assert for_layer(own, chosen[1]) == Variant(method="simple", label="simple8", params={"bits": 3, "group": 64})
    assert for_layer(own, {}) is own


def test_a_method_whose_layers_are_alike_is_asked_once_for_all(simple: Any) -> None:
    """No mapping at all, and none either where no layer is packed."""
    method, variant = guarded(simple, None)
    assert layer_params(method, variant, PARTS, None) == ()
    assert layer_params(guarded(simple, [{}])[0], variant, {}, None) == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([{"bits": 4}], "returned 1 mappings for 3 layers"),
        ("abc", "not a list"),
        ([{"bits": 4}, 4, {}], "gave layer 5 an object of type int"),
        ([{}, {}, {"width": 4}], "gave layer 9 'width', which is none of its parameters"),
        ([{"bits": 9}, {}, {}], "gave layer 2 bits 9, above 8"),
        ([{"bits": 4.5}, {}, {}], "gave layer 2 bits 4.5, and not a whole number"),
        ([{"bits": None}, {}, {}], "gave layer 2 bits None"),
    ],
)
def test_what_no_layer_could_be_built_with_fences_the_method(simple: Any, answer: Any, message: str) -> None:
    """One mapping a layer, of values that the method's own parameters take."""
    method, variant = guarded(simple, answer)
    with pytest.raises(MethodRefused, match=message):
        layer_params(method, variant, PARTS, None)
    assert method.tripped is not None
    assert method.refuses(variant, PART) == ("quarantined", method.tripped)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_missing_calibration_is_an_answer_and_no_failure(simple: Any, trusted: Any) -> None:
    """The refusal names the field, keeps the method's hint, and the method stays on offer."""

    def answer(places: Any, calibration: Any) -> Any:
        if calibration is None:
            raise MethodRefused("no calibration of this model", hint="run `veloxquantctl calibrate`")
        return [{"bits": calibration.bits[0]} for _ in places]

    method, variant = guarded(simple, answer, trusted=trusted)
    for _ in range(2):
        with pytest.raises(MethodRefused, match="no calibration of this model") as caught:
            layer_params(method, variant, PARTS, None)
        assert (caught.value.field, caught.value.hint) == (NOT_CALIBRATED, "run `veloxquantctl calibrate`")
    assert method.tripped is None
    assert layer_params(method, variant, PARTS, calibration()) == ({"bits": 2},) * 3


def test_a_calibration_is_found_by_layer() -> None:
    """Layers that were not measured have none."""
    assert calibration().layer(2) == SENSITIVE
    assert calibration().layer(3) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": ()},
        {"bits": (4, 2)},
        {"bits": (2, 4, 8)},
        {"layers": (SENSITIVE, SENSITIVE)},
        {"layers": (LayerSensitivity(index=0, key=((0.1, -0.1),), value=()),)},
        {"layers": (LayerSensitivity(index=0, key=(), value=((float("nan"), 0.1),)),)},
    ],
)
def test_tables_that_do_not_match_their_widths_are_refused(changes: Any) -> None:
    """A figure for each width, none of them negative or no number, each layer once and in order."""
    with pytest.raises(InvalidParams, match="no calibration"):
        calibration(**changes)

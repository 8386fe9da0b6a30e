"""A method told in plain values: what a user may set, what each variant stores, where it may be used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from veloxquant.errors import MethodRefused
from veloxquant.methods import Parameter, describe
from veloxquant.methods.registry import load


def test_a_variant_is_told_with_its_bits_widths_and_prior() -> None:
    """mlx-lm's format at 4 bits in groups of 64: 4 + 2 x 16 / 64 bits, on widths that 64 divides."""
    told = {one["label"]: one for one in describe.variants(load(only=["affine"]).method("affine"))}
    one = told["affine4-g64"]
    assert (one["key_bits"], one["value_bits"], one["fixed_bytes"]) == (4.5, 4.5, 0)
    assert one["bits_at"] == {"4096": 4.5, "32768": 4.5}
    assert one["widths"] == [64, 128, 192, 256, 576]
    assert (one["layers"], one["sample"]) == ("alike", {"heads": 8, "width": 128, "itemsize": 2})
    assert one["kl_low"] <= one["kl_mean"] <= one["kl_high"]
    assert msgspec.json.decode(msgspec.json.encode(one)) == one


def test_slots_that_are_counted_and_fixed_bytes_are_in_the_whole(simple: Any) -> None:
    """1,024 slots at 8 bits and 8,192 bytes for 4,096 and for 32,768 tokens of 8 heads of 128, K and V."""
    answers = {"slots": lambda *_: 1024, "fixed_bytes": lambda *_: 8192, "fused_attention": True}
    (told,) = describe.variants(type("Bounded", (simple,), answers)())
    numbers = 8 * 2 * 128
    expected = {tokens: (1024 * numbers * 8 + 8192 * 8) / (tokens * numbers) for tokens in (4096, 32768)}
    assert told["bits_at"] == {str(tokens): bits for tokens, bits in expected.items()}


def refusing(field: Any) -> Any:
    """A `layer_params` that refuses, naming this field."""

    def layer_params(*_: Any) -> Any:
        raise MethodRefused("no", field=field)

    return layer_params


def test_whether_layers_differ_is_told(simple: Any) -> None:
    """Alike, differing, or by a calibration; a failure is told in the place of figures."""
    methods = {
        "alike": None,
        "differ": lambda _self, _variant, places, _calibration: [{"bits": 4} for _ in places],
        "calibration": refusing("calibration"),
    }
    for word, function in methods.items():
        made = type("Made", (simple,), {} if function is None else {"layer_params": function})()
        assert describe.variants(made)[0]["layers"] == word
    (failed,) = describe.variants(type("Failing", (simple,), {"layer_params": refusing(None)})())
    assert failed == {"label": "simple8", "params": {}, "failed": "no"}


def test_a_variant_that_takes_no_width_has_no_figures(simple: Any) -> None:
    """There is no layer to tell them of."""
    (told,) = describe.variants(type("No", (simple,), {"refuses": lambda *_: ("not_supported_by_engine", "no")})())
    assert told["widths"] == []
    assert "key_bits" not in told


@pytest.mark.parametrize("kind", ["int", "float"])
def test_parameters_are_told_as_they_are(simple: Any, kind: Any) -> None:
    """Every field, plain."""
    one = Parameter(name="bits", kind=kind, default=4, low=1, high=8, help="bits a number")
    told = describe.parameters(type("Set", (simple,), {"parameters": lambda _: [one]})())
    assert told == (
        {"name": "bits", "kind": kind, "default": 4, "low": 1, "high": 8, "choices": [], "help": "bits a number"},
    )

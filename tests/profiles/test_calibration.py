"""A calibration holds tables that can be read column by column, or is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from veloxquant.errors import InvalidParams
from veloxquant.profiles.calibration import Calibration, LayerSensitivity

LAYER = LayerSensitivity(
    index=3, key=((0.2, 0.1),), value=((0.3, 0.1),), key_order=((1, 0),), key_classes=((0.1, 0.0), (0.1, 0.0))
)


def calibration(bits: Any = (2, 4), layers: Any = (LAYER,)) -> Calibration:
    """Of one layer."""
    return Calibration(
        model_id="org/model", architecture="llama", config_hash="0", tokens=512, text="a test", bits=bits, layers=layers
    )


def test_it_is_read_as_it_was_written() -> None:
    """As JSON; equal ones have one hash, since plans are remembered by it."""
    made = calibration()
    read = msgspec.json.decode(msgspec.json.encode(made), type=Calibration)
    assert read == made
    assert hash(read) == hash(made)
    assert (made.layer(3), made.layer(0)) == (LAYER, None)


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"bits": ()}, "bits", "not ascending"),
        ({"bits": (4, 2)}, "bits", "not ascending"),
        ({"bits": (2, 2)}, "bits", "not ascending"),
        ({"layers": (LAYER, LAYER)}, "layers", "each once"),
        ({"bits": (2, 3, 4)}, "layers", "not one figure for each of 3 widths"),
        ({"value": ((0.1,),)}, "layers", "not one figure"),
        ({"key_classes": ((0.1,),)}, "layers", "not one figure"),
        ({"key": ((0.1, -0.1),)}, "layers", "negative or no number"),
        ({"key": ((0.1, float("nan")),)}, "layers", "negative or no number"),
        ({"key": ((0.1, float("inf")),)}, "layers", "negative or no number"),
        ({"key_order": ((0, 0),)}, "layers", "name each channel once"),
        ({"key_order": ((0, 1), (0, 1, 2))}, "layers", "name each channel once"),
        ({"key_order": ((1, 2),)}, "layers", "name each channel once"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(changes: dict[str, Any], field: str, why: str) -> None:
    """Naming what is wrong."""
    if not changes.keys() & {"bits", "layers"}:
        changes = {"layers": (msgspec.structs.replace(LAYER, **changes),)}
    with pytest.raises(InvalidParams, match=why) as told:
        calibration(**changes)
    assert told.value.field == field


def test_a_layer_without_an_order_is_one() -> None:
    """Methods that need it say so."""
    plain = LayerSensitivity(index=0, key=((0.1, 0.0),), value=((0.1, 0.0),))
    assert calibration(layers=(plain,)).layer(0) == plain

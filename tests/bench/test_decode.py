"""The decode benchmark: who takes part, what is compared with what, and what is printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import decode
import pytest
from decode import FLOAT, Contender, Row, Shape

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Shape(heads=2, repeats=2, width=64, layers=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts with two KV heads of width 64, and a model of hidden size 64."""
    monkeypatch.setattr(decode, "SHAPES", {"attention": Shape(heads=2, repeats=2, width=64), "model": SMALL})
    plain = decode.model_step
    monkeypatch.setattr(decode, "model_step", lambda shape: plain(shape, hidden=64, vocabulary=50))


@pytest.mark.usefixtures("small")
def test_every_method_takes_part_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens, a round: a row for the float cache, mlx-lm's and the asked variants, each with its ratios."""
    file = tmp_path / "decode.json"
    words = ["--tokens", "200", "--rounds", "1", "--only", "kivi-k4v4", "turboquant-mse4", "adaptive-4"]
    assert decode.main([*words, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["schema"] == "veloxquant.decode.v1"
    assert set(written["load_average"]) == {"before", "after"}
    rows = [Row(**row) for row in written["rows"]]
    for part in ("attention", "model"):
        ours = {row.label: row for row in rows if row.part == part}
        assert {FLOAT, "mlx-lm 4 bits", "mlx-lm 2 bits", "kivi-k4v4", "turboquant-mse4", "adaptive-4"} <= set(ours)
        assert ours[FLOAT].over_float == 1.0
        assert ours[FLOAT].over_engine is None
        assert ours["mlx-lm 4 bits"].over_engine == 1.0
        assert ours["kivi-k4v4"].engine == "mlx-lm 4 bits"
        # Its budget is 4 bits, of which it leaves less unspent than the narrowest step of a class or a head takes.
        assert 3.5 < ours["adaptive-4"].bits <= 4.0
        assert ours["adaptive-4"].engine == "mlx-lm 4 bits"
        # 2 x 64 numbers of 2 heads in each layer: 4 sinks, a ring of 128, and two packed groups of 64, in float32.
        layers = 1 if part == "attention" else 2
        assert ours["kivi-k4v4"].bytes == layers * 2 * 2 * 64 * (132 * 4 + 128 * 5 // 8)
    printed = capsys.readouterr().out
    assert "### attention, 200 tokens" in printed
    assert "### model, 200 tokens" in printed
    assert "load average" in printed


def test_one_variant_of_each_method_stands_for_it_in_the_model() -> None:
    """Methods are found as anybody's are; the engine's own formats are there by themselves."""
    labels = [one.label for one in decode.contenders(SMALL, [], first=True)]
    assert labels[0] == FLOAT
    assert sum(label.startswith("kivi") for label in labels) == 1
    assert sum(label.startswith("turboquant-mse") for label in labels) == 1
    assert not any(label.startswith(("affine", "fp16")) for label in labels)
    every = [one.label for one in decode.contenders(SMALL, [], first=False)]
    assert sum(label.startswith("kivi") for label in every) == 5
    assert len(every) == len(set(every))


def test_what_does_not_fit_the_shape_is_left_out_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """No group divides 80."""
    labels = [one.label for one in decode.contenders(Shape(width=80), ["kivi-k4v4"], first=False)]
    assert not any(label.startswith("kivi") for label in labels)
    assert "left out: kivi-k4v4: groups of 32, 64 or 128 do not divide the value width 80" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bits", "engine"),
    [(4.5, "mlx-lm 4 bits"), (4.0, "mlx-lm 4 bits"), (2.25, "mlx-lm 2 bits"), (16.0, "mlx-lm 8 bits")],
)
def test_a_method_is_compared_with_no_fewer_bits(bits: float, engine: str) -> None:
    """The engine's cache of the fewest bits that are no fewer, else its widest."""
    known: dict[str, Any] = {f"mlx-lm {each} bits": [1.0] for each in decode.ENGINE_BITS}
    assert decode._engine(Contender("one", bits, lambda _: None), known) == engine


def test_ratios_are_of_rounds_and_not_of_medians() -> None:
    """Twice as fast in each round is twice as fast, whatever the machine did meanwhile."""
    assert decode._ratio([10.0, 100.0, 30.0], [5.0, 50.0, 15.0]) == 2.0


def test_filled_caches_hold_the_same_tokens() -> None:
    """For every contender, in calls of 512."""
    float_cache, packed = list(decode.contenders(SMALL, ["kivi-k4v4"], first=False))[0::5][:2]
    ours, theirs = (decode.fill(one, SMALL, 600) for one in (packed, float_cache))
    assert [cache.offset for cache in ours] == [600, 600]
    assert (ours[0].key_part.sinks[0] == theirs[0].keys[:, :, :4]).all().item()

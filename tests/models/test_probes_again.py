"""Later variants of a method, layers with parameters of their own, and tokens enough for something to be packed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from probe_kit import CONFIGS, DEEPSEEK, GEMMA4

from veloxquant.models.exchange import ProbeRequest, TraceRequest
from veloxquant.models.trace_worker import engine, probes, tracing
from veloxquant.models.trace_worker.factory import load_factory
from veloxquant.models.trace_worker.probes import Prober
from veloxquant.profiles import Calibration, LayerSensitivity

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("factories")

VARIANTS = [ProbeRequest(method="q", label=f"q{bits}", params={"bits": bits, "group": 32}) for bits in (8, 4, 2)]


def prober(config: Mapping[str, Any], factory: str = "quantized", calibration: Any = None) -> Prober:
    """On a config in float16."""
    profile = tracing.trace(config, "float16")
    return Prober(engine.build(config, "float16"), profile, load_factory(f"engine_factory:{factory}"), calibration)


@pytest.mark.parametrize("name", ["llama", "gemma4", "gpt_oss", "phi3small", "gemma2", "deepseek_v3", "qwen3_next"])
def test_a_later_variant_gets_what_it_would_have_got_first(name: str) -> None:
    """Packed, kept and refused alike, each in the same words, whatever was tried before it."""
    configs = CONFIGS | {"gemma4": GEMMA4, "deepseek_v3": {**CONFIGS["deepseek_v3"], **DEEPSEEK}}
    shared = prober(configs[name])
    assert [shared.probe(one) for one in VARIANTS] == [prober(configs[name]).probe(one) for one in VARIANTS]


def test_a_later_variant_runs_through_the_first_layers_alone(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]
) -> None:
    """Of 24 alike layers the first is called, in each of the three calls."""
    many = prober({**tiny, "num_hidden_layers": 24})
    first = many.probe(VARIANTS[0])
    updated: list[int] = []
    built = many._factory.build

    def build(*asked: Any) -> Any:
        updated.append(asked[3])
        return built(*asked)

    monkeypatch.setattr(many._factory, "build", build)
    assert many.probe(VARIANTS[1]).packed == first.packed == tuple(range(24))
    assert updated == [0]


def test_a_later_variant_of_another_class_goes_through_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]
) -> None:
    """What the engine does with one class says nothing about another."""
    shared = prober(tiny, "slotted")
    shared.probe(VARIANTS[0])
    monkeypatch.setattr(shared, "_factory", load_factory("engine_factory:quantized"))
    built: list[int] = []
    build = shared._factory.build
    monkeypatch.setattr(shared._factory, "build", lambda *asked: (built.append(asked[3]), build(*asked))[1])
    assert shared.probe(VARIANTS[1]).packed == (0, 1, 2, 3)
    assert built == [0, 0, 1, 2, 3]


def test_a_later_variant_with_wrong_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]) -> None:
    """Each declares its own."""
    shared = prober(tiny)
    shared.probe(VARIANTS[0])
    monkeypatch.setattr(shared, "_factory", load_factory("engine_factory:careless"))
    assert "its method declares" in str(shared.probe(VARIANTS[1]).refused)


def test_layers_are_built_with_their_own_parameters(tiny: dict[str, Any]) -> None:
    """The trace says which; the bytes of both kinds were compared, or it would have refused."""
    found = prober(tiny, "by_layer").probe(VARIANTS[1])
    assert found.packed == (0, 1, 2, 3)
    assert found.layer_params == ((("bits", 8),), (("bits", 4),), (("bits", 4),), (("bits", 4),))


def test_parameters_are_chosen_anew_for_the_layers_that_are_left() -> None:
    """phi-3-small keeps every second layer: the first that is packed is the first that counts."""
    found = prober(CONFIGS["phi3small"], "by_layer").probe(VARIANTS[1])
    assert (found.packed, found.layer_params) == ((1, 3), ((("bits", 8),), (("bits", 4),)))


def test_a_layer_refused_under_its_own_parameters_keeps_the_engines_cache(tiny: dict[str, Any]) -> None:
    """In the method's words; the others are packed."""
    found = prober(tiny, "by_layer").probe(ProbeRequest(method="q", label="picky", params={"bits": 8, "group": 32}))
    assert (found.packed, found.layer_params) == ((0,), ((("bits", 8),),))
    assert {(kept.index, kept.detail) for kept in found.kept} == {(i, "4 bits are too few") for i in (1, 2, 3)}


def test_alike_layers_have_no_parameters_of_their_own(tiny: dict[str, Any]) -> None:
    """An empty list, as of a method that knows nothing of layers."""
    found = prober(tiny, "by_layer").probe(ProbeRequest(method="q", label="alike", params={"bits": 8, "group": 32}))
    assert (found.packed, found.layer_params) == ((0, 1, 2, 3), ())


CALIBRATION = Calibration(
    model_id="m",
    architecture="llama",
    config_hash="h",
    tokens=10,
    text="t",
    bits=(2, 8),
    layers=(LayerSensitivity(index=0, key=((0.2, 0.1),), value=((0.2, 0.1),)),),
)


def test_what_lacks_a_calibration_is_not_tried_and_says_so(tiny: dict[str, Any]) -> None:
    """No call of the model; with one, its parameters are those that are tried."""
    wanted = ProbeRequest(method="q", label="calibrated", params={"bits": 8, "group": 32})
    without = prober(tiny, "by_layer").probe(wanted)
    assert (without.untried, without.packed, without.kept, without.refused) == (
        "no calibration of this model",
        (),
        (),
        None,
    )
    found = prober(tiny, "by_layer", CALIBRATION).probe(wanted)
    assert found.layer_params == ((("bits", 8),), (("bits", 2),), (("bits", 2),), (("bits", 2),))


def test_the_calibration_travels_to_the_worker_with_the_request(tiny: dict[str, Any]) -> None:
    """And parameters by layer come back with the probe."""
    wanted = ProbeRequest(method="q", label="calibrated", params={"bits": 8, "group": 32})
    request = TraceRequest(
        model_id="m",
        config_json=json.dumps(tiny),
        config_hash="h",
        dtype="float16",
        factory="engine_factory:by_layer",
        probes=(wanted,),
        calibration=CALIBRATION,
    )
    _, probed = tracing.answers(request)
    assert probed.probe.layer_params[1] == (("bits", 2),)


@pytest.mark.parametrize("at", [0, 1])
def test_a_method_that_packs_late_is_tried_with_tokens_enough(tiny: dict[str, Any], at: int) -> None:
    """Its bytes are compared again once it has packed something, for the first variant and for the next."""
    assert probes.PROBE_RUNS == ((8, 1), (1, 2))
    sound, wrong = prober(tiny, "late"), prober(tiny, "late_and_wrong")
    assert [sound.probe(one).packed for one in VARIANTS[: at + 1]][at] == (0, 1, 2, 3)
    refused = [wrong.probe(one).refused for one in VARIANTS[: at + 1]][at]
    assert "its method declares" in str(refused)

"""Which layers are packed, which keep the engine's cache, and in whose words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import Own, Packed, ask, candidate, codes, kv, mac, model, offers, rejection, state, window

from veloxquant.errors import MethodRefused
from veloxquant.profiles import CacheLayer, KeptLayer, ModelProfile, Probe

if TYPE_CHECKING:
    from veloxquant.methods.method import Variant
    from veloxquant.profiles import CachePart

MACHINE = mac(512, 400)
FOUR = offers(Own(), Packed(bits=(4,), groups=(64,)))


def _packed(profile: ModelProfile) -> Any:
    return candidate(ask(profile, MACHINE, on_offer=FOUR, max_kl=10), "affine4-g64")


def test_the_trace_decides_and_is_cited() -> None:
    """A donor layer the method would have packed stays, in the engine's words."""
    kept = KeptLayer(index=3, reason="donor", detail="'tuple' has no shape")
    probe = Probe(method="affine", label="affine4-g64", packed=(0, 1, 2), kept=(kept,))
    one = _packed(model([kv(8, 128)] * 4, probes=(probe,)))
    assert (one.layers.packed, one.layers.kept) == (3, 1)
    assert one.layers.reasons == {
        "donor": "1 layer keeps the engine's cache, which other layers read as it is ('tuple' has no shape)"
    }
    assert one.memory.evidence.source == "traced"
    assert one.memory.stored_bytes == 4096 * 4096 * (3 * 4.5 / 16 + 1)
    assert one.engine_settings is None


def test_without_a_trace_the_methods_word_is_taken_with_a_warning() -> None:
    """Nothing proves that the engine accepts it, and the confidence says so."""
    answer = ask(model([kv(8, 128)] * 4), MACHINE, on_offer=FOUR, max_kl=10, methods=("affine",))
    assert answer.chosen is not None
    assert "not_proven_by_trace" in codes(answer.warnings)
    assert answer.chosen.memory.evidence.source == "analytic"
    assert any("not proven by a trace" in note for note in answer.chosen.memory.evidence.notes)


def test_a_traced_layout_carries_no_such_warning() -> None:
    """The probe is the proof."""
    probe = Probe(method="affine", label="affine4-g64", packed=(0,))
    answer = ask(model([kv(8, 128)], probes=(probe,)), MACHINE, on_offer=FOUR, max_kl=10, methods=("affine",))
    assert "not_proven_by_trace" not in codes(answer.warnings)


def test_layers_of_each_kind_are_counted() -> None:
    """A composite of a growing cache and a state counts as both."""
    both = CacheLayer(index=3, engine_class="CacheList", parts=(kv(8, 128), state(10)))
    parts = (kv(8, 128), window(8, 128, 512), state(10))
    plain = tuple(CacheLayer(index=i, engine_class=p.engine_class, parts=(p,)) for i, p in enumerate(parts))
    one = _packed(model([kv(8, 128)], layers=(*plain, both)))
    found = one.layers
    assert (found.total, found.growing, found.windowed, found.recurrent) == (4, 2, 1, 2)
    assert (found.packed, found.kept) == (1, 3)
    assert set(found.reasons) == {"composite", "state", "window"}


def test_layers_of_mixed_widths_are_packed_where_the_group_divides() -> None:
    """The others keep the engine's cache, with the width as the reason."""
    one = _packed(model([kv(8, 128), kv(8, 96)]))
    assert one.cache_config["packed_layers"] == [0]
    assert "groups of 64 do not divide" in one.layers.reasons["width"]


@pytest.mark.parametrize(
    ("word", "code", "told"),
    [
        ("width", "width_not_divisible", "why"),
        ("engine_error", "not_supported_by_engine", "why"),
        (
            "sinks",
            "not_supported_by_engine",
            "1 layer keeps the engine's cache: attention sinks, which packed attention refuses (why)",
        ),
    ],
)
def test_nothing_packed_in_the_trace_is_a_rejection(word: str, code: str, told: str) -> None:
    """With the code of what stood in the way, and in words unless the method or the engine had its own."""
    probe = Probe(method="affine", label="affine4-g64", kept=(KeptLayer(index=0, reason=word, detail="why"),))
    answer = ask(model([kv(8, 128)], probes=(probe,)), MACHINE, on_offer=FOUR)
    assert answer.decision == "nothing_to_quantize"
    assert (rejection(answer, "affine4-g64").reason, rejection(answer, "affine4-g64").detail) == (code, told)


def test_a_width_the_trace_refused_keeps_its_own_code() -> None:
    """The trace writes the refusal in words and the kind of it on the layers."""
    words = "groups of 64 do not divide the key width 96"
    probe = Probe(
        method="affine",
        label="affine4-g64",
        kept=(KeptLayer(index=0, reason="width", detail=words),),
        refused=words,
    )
    refused = rejection(ask(model([kv(8, 96)], probes=(probe,)), MACHINE, on_offer=FOUR), "affine4-g64")
    assert (refused.reason, refused.detail) == ("width_not_divisible", words)


class _Broken(Packed):
    """Answers at load and fails on a real layer, as `methods.guard` reports it."""

    name = "affine"

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Refuses."""
        raise MethodRefused("affine failed in key_bits", hint="")


class _Fenced(Packed):
    """Tripped earlier: `methods.guard` answers for it."""

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Says so."""
        return "quarantined", "it hung"


@pytest.mark.parametrize("method", [_Broken(bits=(4,), groups=(64,)), _Fenced(bits=(4,), groups=(64,))])
def test_a_method_that_breaks_is_listed_and_harms_no_other(method: Packed) -> None:
    """The plan goes on without it."""
    answer = ask(model([kv(8, 128)]), MACHINE, on_offer=offers(Own(), method))
    assert answer.decision == "keep_fp16"
    assert rejection(answer, "affine4-g64").reason == "quarantined"


def test_a_static_model_is_said_to_be_one() -> None:
    """Sizes by rule, not by trace."""
    answer = ask(model([kv(8, 128)], source="static", confidence=0.6), MACHINE, on_offer=FOUR)
    assert "model_not_traced" in codes(answer.warnings)
    assert answer.chosen is not None
    assert answer.chosen.memory.evidence.confidence == 0.6


def test_lengths_beyond_the_models_positions_are_said() -> None:
    """It fits, and the model was not made for it."""
    answer = ask(model([kv(8, 128)], max_position=4096), MACHINE, context_length=4096, generation_length=1)
    assert "context_beyond_model" in codes(answer.warnings)


def test_the_first_party_plugins_plan_as_the_stand_ins_do() -> None:
    """The real fp16 and affine methods: 4.5 and 8.5 bits of Llama at 32k are 1.125 and 2.125 GiB."""
    from veloxquant_plugins.affine import Affine
    from veloxquant_plugins.fp16 import EngineOwn

    answer = ask(
        model([kv(8, 128)] * 32), MACHINE, on_offer=offers(EngineOwn(), Affine()), context_length=32768, max_kl=9
    )
    stored = {c.label: c.memory.stored_bytes / 2**30 for c in (answer.chosen, *answer.alternatives) if c is not None}
    assert (stored["fp16"], stored["affine8-g64"], stored["affine4-g64"]) == (4.0, 2.125, 1.125)
    assert candidate(answer, "fp16").engine_settings == {"prefill_step_size": 2048}
    packed = candidate(answer, "affine4-g64").engine_settings
    assert packed == {"kv_bits": 4, "kv_group_size": 64, "quantized_kv_start": 0, "prefill_step_size": 2048}

"""What hardly ever happens: methods that fail at odd moments, figures that are no numbers, records that say little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from planner_kit import (
    Own,
    Packed,
    PerLayer,
    ask,
    candidate,
    codes,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    qwen35_27b,
    record,
    rejection,
    state,
)
from planner_kit import snapshot as known

from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.planner import decide, evidence, explain, growth, layout, siblings, speed, suggest
from veloxquant.planner.option import Option
from veloxquant.planner.plan import plan
from veloxquant.planner.quality import prior
from veloxquant.planner.request import PlanRequest
from veloxquant.profiles import CacheLayer, KeptLayer, Probe, WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.methods.method import Variant
    from veloxquant.profiles import CachePart

ROOMY = mac(64, 48)


class Failing(Packed):
    """Refuses to answer, of a part or of layers, instead of saying that it cannot keep them."""

    name = "failing"

    def __init__(self, at: str) -> None:
        super().__init__(bits=(4,), groups=(64,))
        self._at = at

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Fails at "part"."""
        if self._at == "part":
            raise MethodRefused("the method broke", hint="", field="")
        return super().refuses(variant, part)

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Fails at "bits"."""
        if self._at == "bits":
            raise MethodRefused("the method broke", hint="", field="")
        return super().key_bits(variant, part)


class BrokenPerLayer(PerLayer):
    """Chooses no parameters for a reason that no calibration mends."""

    def layer_params(self, variant: Variant, places: Any, calibration: Any) -> Any:
        """Fails."""
        raise MethodRefused("the method broke", hint="report it", field="params")


def test_a_method_that_fails_at_a_part_is_refused_with_its_words() -> None:
    """Each layer is kept, and why is told."""
    refused = rejection(ask(llama_8b(), ROOMY, on_offer=offers(Own(), Failing("part"))), "affine4-g64")
    assert refused.reason == "not_supported_by_engine"
    assert "the method broke" in refused.detail


def test_a_method_that_fails_to_choose_by_layer_is_quarantined() -> None:
    """A calibration would not help, so none is asked for."""
    broken = BrokenPerLayer("broken", 4, 0.001, step=64, bound=1024)
    refused = rejection(ask(llama_8b(), ROOMY, on_offer=offers(Own(), broken)), "broken")
    assert (refused.reason, refused.detail) == ("quarantined", "the method broke")


def test_what_the_trace_and_the_layers_say_is_both_told() -> None:
    """The engine's own error first, then why each layer is kept, where that is something else."""
    kept = (KeptLayer(index=0, reason="engine_error", detail="shapes do not match"),)
    probe = Probe(method="affine", label="affine4-g64", kept=kept, refused="the call failed")
    answer = ask(model([kv(8, 128)], probes=(probe,)), ROOMY, on_offer=offers(Own(), Packed(bits=(4,), groups=(64,))))
    detail = rejection(answer, "affine4-g64").detail
    assert detail.startswith("refused in the trace of this model: the call failed")
    assert "shapes do not match" in detail


def test_a_plan_for_another_engine_version_says_so() -> None:
    """The model was traced under the installed one."""
    request = PlanRequest(
        model=llama_8b(engine_version="0.32.2"),
        workload=WorkloadProfile(context_length=4096),
        engine_version="0.30.0",
    )
    answer = plan(request, known(ROOMY))
    (note,) = [one for one in answer.warnings if one.code == "engine_version_differs"]
    assert "0.30.0" in note.text
    assert "0.32.2" in note.text
    same = plan(msgspec.structs.replace(request, engine_version="0.32.2"), known(ROOMY))
    assert "engine_version_differs" not in codes(same.warnings)


def test_readers_are_equal_to_readers_only() -> None:
    """They are keys of what was computed."""
    (offer,) = offers(Own())
    reader = growth.Reader(offer.method, offer.variant)
    assert reader == growth.Reader(offer.method, offer.variant)
    assert reader != "fp16"


def test_a_sibling_without_a_figure_scales_nothing() -> None:
    """Nor does one whose figure makes another endless."""
    told, other = (
        siblings._Told(offer.variant, prior(offer.method, offer.variant, 4096), None, ())
        for offer in offers(Packed(bits=(4,), groups=(32, 64)))
    )
    assert siblings._scaled(told.prior, other) is None
    tiny = msgspec.structs.replace(other.prior, kl_mean=5e-324)
    assert siblings._scaled(told.prior, other._replace(prior=tiny, grounded=other.prior)) is None
    scaled = siblings._scaled(told.prior, other._replace(grounded=other.prior))
    assert scaled is not None
    assert scaled.kl_mean == pytest.approx(told.prior.kl_mean)


def test_a_method_that_fails_at_its_bits_has_none() -> None:
    """So that no sibling is finer or coarser by them."""
    method = Failing("bits")
    (variant,) = method.variants()
    assert siblings._stored_bits(method, variant, kv(8, 128)) is None
    assert siblings._stored_bits(Packed(), variant, None) is None


def test_a_record_without_bytes_tells_none() -> None:
    """Neither measured nor as a ratio."""
    shape: Any = None
    assert evidence._bytes_of(record("affine4-g64", throughput_tok_s=10.0), shape) is None
    assert evidence._bytes_of(record("affine4-g64", memory_bytes=64), shape) == 64


def test_the_tokens_that_a_record_states_count() -> None:
    """By its tag; else what its own run generated came after the prompt, and of other runs only the prompt counts."""
    assert evidence._tokens(record("fp16", tags=["tokens=4608"])) == 4608
    workload = WorkloadProfile(context_length=8192, generation_length=100)
    assert evidence._tokens(record("fp16", source="measured", workload=workload)) == 8292
    assert evidence._tokens(record("fp16", source="manual", workload=workload)) == 8192


def test_rates_are_compared_only_where_both_are_known() -> None:
    """By requests in a step where no time is known at all: 4 are two doublings better than 1."""
    setting = SimpleNamespace(baseline_decode=SimpleNamespace(ms=10.0), workload=SimpleNamespace(sequences=2))
    served = SimpleNamespace(in_one_step=4, sure_tok_s=None)
    option: Any = SimpleNamespace(setting=setting, served=served)
    assert decide._rate_step(option) == 0
    setting.baseline_decode = None
    assert decide._rate_step(option) == -2


def test_the_engines_own_cache_has_the_engines_own_line() -> None:
    """Another variant's differs in the shape that is read."""
    base = SimpleNamespace(_replace=lambda *, shape: ("with", shape))
    own: Any = SimpleNamespace(engine_own=True, setting=SimpleNamespace(baseline_line=base), shape="s")
    assert Option.line.func(own) is base
    own.engine_own = False
    assert Option.line.func(own) == ("with", "s")


def test_no_smaller_step_where_one_token_was_asked_for() -> None:
    """There is none below."""
    setting: Any = SimpleNamespace(steps=(1,))
    fits: Any = SimpleNamespace(sizing=SimpleNamespace(short_by=0), label="x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suggest, "_fits_at", lambda *_: True)
        assert suggest._smaller_step(setting, [fits]) == []


def test_what_the_trace_and_the_layers_say_alike_is_told_once() -> None:
    """The engine's error that is already why a layer is kept."""
    kept = (KeptLayer(index=0, reason="engine_error", detail="the call failed: shapes do not match"),)
    probe = Probe(method="affine", label="affine4-g64", kept=kept, refused="the call failed")
    answer = ask(model([kv(8, 128)], probes=(probe,)), ROOMY, on_offer=offers(Own(), Packed(bits=(4,), groups=(64,))))
    assert rejection(answer, "affine4-g64").detail.count("the call failed") == 1


def test_a_variant_that_is_not_in_a_plan_cannot_be_explained() -> None:
    """It is named, and so are those that are."""
    answer = ask(llama_8b(), ROOMY, on_offer=offers(Own()))
    with pytest.raises(InvalidParams) as caught:
        explain.explain(answer, "nonesuch")
    assert caught.value.message == "the plan has no variant 'nonesuch'"
    assert (caught.value.hint, caught.value.field) == ("it has fp16", "label")


def test_an_explanation_tells_what_grows_and_what_does_not() -> None:
    """Qwen3.5-27B: 16 layers of 4 KV heads of 256 in 16 bits are 65,536 bytes a token; 48 states stay as they are."""
    answer = ask(qwen35_27b(state_bytes=2**20), mac(192, 144), on_offer=offers(Own()))
    text = "\n".join(explain.explain(answer, "fp16"))
    assert "65,536 bytes more with each token of a sequence, 48 MiB that do not grow" in text


def test_a_generation_that_leaves_no_room_for_a_prompt_is_told_in_tokens() -> None:
    """What fits in all, and what was asked for."""
    answer = ask(llama_8b(weights_bytes=0), mac(1, 0.75), context_length=1, generation_length=100_000)
    (note,) = [one for one in answer.suggestions if one.code == "shorter_generation"]
    assert f"fits {note.value:,} tokens in all" in note.text
    assert "100,001 were asked for" in note.text


def test_a_budget_above_what_is_free_is_not_what_to_raise() -> None:
    """The machine is the limit then; with a budget below it, the budget is."""
    tight = ask(llama_8b(), mac(16, 11), budget=2**40, context_length=131_072, on_offer=offers(Own()))
    assert "raise_budget" not in codes(tight.suggestions)
    capped = ask(llama_8b(), mac(64, 48), budget=2**30, context_length=131_072, on_offer=offers(Own()))
    assert "raise_budget" in codes(capped.suggestions)


def test_layers_of_several_parts_are_named_by_them() -> None:
    """A latent cache by its own name."""
    latent = kv(1, 512, value=64, latent=True)
    assert layout._inside(CacheLayer(index=0, engine_class="CacheList", parts=(latent, latent))) == (
        "a latent cache in one"
    )


def test_more_sequences_than_were_measured_take_turns_where_no_bandwidth_is_known() -> None:
    """Fewer are taken to be as quick as what was measured."""
    line: Any = SimpleNamespace(ms=lambda *_: None)
    measured: Any = SimpleNamespace(context=8192, sequences=2)
    asked: Any = SimpleNamespace(tokens=8192, sequences=6)
    times, how = speed._how_much_longer(line, asked, measured)
    assert (times, "one after another" in how) == (3, True)
    asked.sequences = 2
    assert speed._how_much_longer(line, asked, measured) == (1.0, "")


def test_a_model_of_states_alone_holds_what_was_measured_at_any_length() -> None:
    """Mamba's cache is as large after one token as after a million: no line through one point is needed."""
    states = model([state(2**20)] * 24)
    seen = [(0.9, record("fp16", model_id="test/model", architecture="test", memory_bytes=30 * 2**20))]
    for tokens in (512, 8192, 131_072):
        answer = ask(states, ROOMY, on_offer=offers(Own()), records=seen, context_length=tokens)
        memory = candidate(answer, "fp16").memory
        assert (memory.stored_bytes, memory.bytes_per_token) == (30 * 2**20, 0)

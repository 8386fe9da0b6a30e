"""Bytes stored, at the peak and in the largest buffer, against the engine's own rules counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_kit import GIB, Own, Synthetic, ask, candidate, kv, llama_8b, mac, model, offers, state, window, windowed

ROOMY = mac(4096)


def _slots_by_replay(context: int, generation: int, step: int, grow: int = 256) -> int:
    """The KVCache rule, call by call: cut to what is held unless aligned, then add whole steps (facts on mlx-lm)."""
    calls = []
    left = context - 1
    while left > 0:
        calls.append(min(step, left))
        left -= calls[-1]
    held = slots = 0
    for tokens in [*calls, *[1] * (1 + generation)]:
        if held + tokens > slots:
            slots = (held if held % grow else slots) + -(-tokens // grow) * grow
        held += tokens
    return slots


@given(context=st.integers(1, 3000), generation=st.integers(0, 600), step=st.integers(1, 2500))
def test_stored_bytes_follow_the_engine_call_by_call(context: int, generation: int, step: int) -> None:
    """Slack and odd prefill steps included: what the engine would hold is what the plan says."""
    answer = ask(
        model([kv(8, 128)] * 4), ROOMY, context_length=context, generation_length=generation, prefill_step_size=step
    )
    assert answer.chosen.memory.stored_bytes == 4 * 4096 * _slots_by_replay(context, generation, step)


@pytest.mark.parametrize(("context", "slots"), [(813, 1068), (814, 856)])
def test_a_longer_context_may_store_less_with_an_unaligned_step(context: int, slots: int) -> None:
    """300, 300, 212, 1 tokens end in 812 + 256 slots; 300, 300, 213, 1 in 600 + 256: the engine's own doing."""
    answer = ask(model([kv(8, 128)]), ROOMY, context_length=context, prefill_step_size=300)
    assert answer.chosen.memory.stored_bytes == slots * 4096 == _slots_by_replay(context, 0, 300) * 4096


@pytest.mark.parametrize(("context", "slots"), [(2, 512), (3, 258)])
def test_a_window_may_store_less_after_a_longer_prompt(context: int, slots: int) -> None:
    """Single tokens grow it by 256, and a call of two makes it as long as they are: 257 singles, or 2 and 256."""
    answer = ask(model([window(1, 64, 512)]), ROOMY, context_length=context, generation_length=255)
    assert answer.chosen.memory.stored_bytes == slots * 2 * 64 * 2


def test_seven_more_tokens_of_llama_store_three_mebibytes_less_with_a_step_of_1000() -> None:
    """1,025 tokens are written as 1000, 24 and 1 and end in 1,280 slots; 1,032 as 1000, 31 and 1, in 1,256."""
    for context, slots in ((1025, 1280), (1032, 1256)):
        own = ask(llama_8b(), ROOMY, context_length=context, prefill_step_size=1000, methods=("fp16",)).chosen
        assert own.memory.stored_bytes == slots * 131072 == _slots_by_replay(context, 0, 1000) * 131072
    assert (1280 * 131072, 1256 * 131072) == (167_772_160, 164_626_432)


@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 1), (1, 4), (2, 5)])
def test_caches_scale_with_batch_times_slots_and_weights_do_not(batch: int, slots: int) -> None:
    """Stored bytes of all sequences; the weights are counted once."""
    one = ask(llama_8b(), ROOMY, context_length=1000)
    many = ask(llama_8b(), ROOMY, context_length=1000, batch_size=batch, num_concurrent_requests=slots)
    assert many.chosen.memory.stored_bytes == batch * slots * one.chosen.memory.stored_bytes
    assert many.chosen.memory.bytes_per_token == one.chosen.memory.bytes_per_token
    rest = many.chosen.fit.total_bytes - many.chosen.memory.peak_bytes
    assert rest == one.chosen.fit.total_bytes - one.chosen.memory.peak_bytes


def test_growth_keeps_the_old_buffer_of_one_layer() -> None:
    """4097 tokens: prefill filled 4096 slots, the last prompt token grows the buffer and copies those."""
    answer = ask(llama_8b(), ROOMY, context_length=4097)
    memory = answer.chosen.memory
    assert memory.peak_bytes - memory.stored_bytes == 4096 * 4096
    assert memory.largest_buffer_bytes == 4352 * 2048, "K or V of one layer after growth"


def test_fused_attention_has_no_score_matrix_and_others_do() -> None:
    """32 query heads x 2048 x 8192 x 2 bytes = 1 GiB for a variant whose attention is not fused."""
    plain, fused = Synthetic("plain", 8, 0.01), Synthetic("fused", 8, 0.01, fused=True)
    answer = ask(llama_8b(), ROOMY, on_offer=offers(Own(), plain, fused), context_length=8192)
    peak = {c.label: c.memory.peak_bytes - c.memory.stored_bytes for c in (answer.chosen, *answer.alternatives)}
    assert peak["plain"] == GIB
    assert peak["fp16"] < GIB / 32
    assert peak["fused"] < GIB / 32


def test_an_engine_without_fused_attention_has_the_score_matrix_itself() -> None:
    """The engine's own cache pays for it where the trace saw attention done by hand."""
    answer = ask(llama_8b(fused_attention=False), ROOMY, context_length=8192)
    assert answer.chosen.memory.peak_bytes - answer.chosen.memory.stored_bytes == GIB


def test_windows_hold_chunk_plus_window_in_prefill() -> None:
    """A 2048-token chunk after another leaves 512 - 1 + 2048 slots in each window until decode cuts them to 512."""
    answer = ask(model([window(4, 256, 512)] * 10), ROOMY, context_length=8193)
    memory = answer.chosen.memory
    assert memory.stored_bytes == 10 * 512 * 4096
    assert memory.peak_bytes >= 10 * (511 + 2048) * 4096
    # Beside them at most one layer's old buffer is alive.
    assert memory.peak_bytes <= 11 * (511 + 2048) * 4096


def test_windows_do_not_grow() -> None:
    """Once windows are full only the growing layers add bytes."""
    short, long = (ask(windowed(), ROOMY, context_length=n).chosen.memory for n in (4096, 65536))
    assert short.fixed_bytes == long.fixed_bytes
    assert long.stored_bytes - short.stored_bytes == (65536 - 4096) * long.bytes_per_token


def test_a_state_is_the_same_at_any_length() -> None:
    """A model of states alone never grows and fits any context."""
    answer = ask(model([state(12345)] * 3), ROOMY, context_length=10**6)
    assert answer.chosen.memory.stored_bytes == answer.chosen.memory.fixed_bytes == 3 * 12345
    assert answer.chosen.memory.bytes_per_token == 0
    assert answer.chosen.fit.max_context_tokens == 2**27


def test_fixed_bytes_of_a_method_count_for_each_layer_and_sequence() -> None:
    """Sinks and recent windows kept beside the packed part."""
    method = Synthetic("sinks", 4, 0.001, fixed=1000)
    answer = ask(llama_8b(), ROOMY, on_offer=offers(method), context_length=256, batch_size=3)
    memory = answer.chosen.memory
    assert memory.fixed_bytes == 3 * 32 * 1000
    assert memory.stored_bytes == 3 * 32 * (1000 + 256 * 8 * 2 * 128 * 4 / 8)


def test_scales_follow_the_item_size_of_the_cache() -> None:
    """In float32 a pair of scales takes 8 bytes a group: 4 + 64/64 = 5 bits, and the notes name the baseline."""
    profile = model([kv(8, 128, itemsize=4)] * 2, dtype="float32")
    packed = candidate(ask(profile, ROOMY, context_length=256, max_kl=10), "affine4-g64")
    assert packed.memory.stored_bytes == 2 * 256 * 8 * 2 * 128 * 5 / 8
    assert packed.memory.fp16_bytes == 2 * 256 * 8 * 2 * 128 * 4
    assert any("float32" in note for note in packed.memory.evidence.notes)


def test_key_and_value_widths_may_differ() -> None:
    """Slots hold both, each at its own width."""
    answer = ask(model([kv(1, 192, value=128)]), ROOMY, context_length=256)
    assert answer.chosen.memory.stored_bytes == 256 * (192 + 128) * 2


def test_one_buffer_may_be_too_large_for_the_device() -> None:
    """Metal refuses buffers above max_buffer_length however much memory there is."""
    machine = mac(512, 400, max_buffer_bytes=GIB // 4)
    # K of one layer at 2**21 tokens: 8 heads x 128 x 2 bytes x 2**21 = 4 GiB.
    answer = ask(llama_8b(), machine, context_length=2**21, methods=("fp16",))
    refused = next(r for r in answer.rejected if r.label == "fp16")
    assert refused.reason == "buffer_too_large"
    assert refused.short_by_bytes == 4 * GIB - GIB // 4


def test_a_smaller_step_keeps_the_score_matrix_within_one_buffer() -> None:
    """The step is halved until 32 x step x context x 2 bytes is allowed, and the plan says so."""
    machine = mac(512, 400, max_buffer_bytes=GIB // 2)
    answer = ask(llama_8b(), machine, context_length=32768, methods=("affine8-g64",))
    assert answer.chosen.cache_config["prefill_step_size"] == 256
    assert answer.chosen.memory.largest_buffer_bytes == GIB // 2
    assert [w.value for w in answer.warnings if w.code == "prefill_step_reduced"] == [256]


def test_terms_add_up_to_the_stored_bytes() -> None:
    """The arithmetic that is shown is the arithmetic that decides."""
    answer = ask(windowed(), ROOMY, context_length=5000, max_kl=10)
    for one in (answer.chosen, *answer.alternatives):
        assert sum(term.bytes for term in one.memory.terms) == one.memory.stored_bytes


def test_the_largest_context_is_exact() -> None:
    """One token more does not fit."""
    answer = ask(llama_8b(), mac(16, 11.8), context_length=1000, max_kl=10)
    for one in (answer.chosen, *answer.alternatives):
        longest = one.fit.max_context_tokens
        fits, beyond = (
            ask(llama_8b(), mac(16, 11.8), context_length=n, methods=(one.label,), max_kl=10)
            for n in (longest, longest + 1)
        )
        assert fits.chosen.label == one.label
        assert beyond.decision == "no_fit"


def test_temporary_copies_of_an_attention_are_in_the_peak_once_not_once_a_layer() -> None:
    """3 bytes a query and slot: 512 x 8,192 in the last chunk is the most; layers take turns."""

    def peak(workspace: int) -> int:
        on_offer = offers(Synthetic("copies", 4.0, 0.01, fused=True, workspace=workspace))
        answer = ask(
            llama_8b(), ROOMY, on_offer=on_offer, context_length=8192, generation_length=100, prefill_step_size=512
        )
        memory = candidate(answer, "copies").memory
        return memory.peak_bytes - memory.stored_bytes

    growing = peak(0)
    assert peak(3) == max(growing, 3 * 512 * 8192) == 12_582_912
    assert peak(1) == max(growing, 512 * 8192)


@pytest.mark.parametrize(("requests", "at_once"), [(1, 1), (4, 4), (16, 8)])
def test_prompts_that_are_processed_together_each_have_their_scores(requests: int, at_once: int) -> None:
    """32 query heads x 2,048 x 8,192 tokens x 2 bytes are 1 GiB for each of up to 8 prompts."""
    together = Synthetic("together", 8, 0.001, batchable=True)
    answer = ask(
        llama_8b(),
        mac(512, 400),
        on_offer=offers(together),
        context_length=8192,
        num_concurrent_requests=requests,
        objective="memory",
    )
    memory = answer.chosen.memory
    assert memory.stored_bytes == requests * 8192 * 65_536
    assert memory.peak_bytes - memory.stored_bytes == at_once * GIB

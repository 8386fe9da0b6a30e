"""What a plan says, to the word, with each figure worked out by hand: sentences are what most people read of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner_kit import GIB, Counting, Own, Synthetic, ask, llama_8b, mac, offers, record, rejection, windowed

from veloxquant.planner.explain import explain

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan

SMALL = mac(16, 11.8)
"""Weights of 4.5 GiB and 0.5 of reserve leave 6.8."""
LARGE = mac(64)
"""48 GiB of working set: 43 are left."""
TOKEN = 32 * 8 * 2 * 128 * 2
"""Bytes of a token in Llama-3.1-8B's own cache: layers, heads, K and V, width, bytes."""
STEP_MS = 4 * GIB / 84e6 + 32 * 0.04
"""The weights at 84 % of 100 GB/s, and 0.04 ms a layer."""


def lines(answer: Plan, label: str | None = None) -> list[str]:
    """The explanation, topics parted from sentences by a bar."""
    return [
        f"{line[:11].strip()}|{line[11:]}".replace("\N{MULTIPLICATION SIGN}", "x") for line in explain(answer, label)
    ]


def told(answer: Plan) -> dict[str, str]:
    """Warnings and suggestions by code; the last where there are several."""
    return {note.code: note.text for note in (*answer.warnings, *answer.suggestions)}


def values(answer: Plan) -> dict[str, object]:
    """Their figures."""
    return {note.code: note.value for note in (*answer.warnings, *answer.suggestions)}


def test_the_engines_own_cache() -> None:
    """8,292 tokens take 33 steps of 256 slots, 1.03 GiB; the last growth copies 8,192 slots of a layer, 32 MiB."""
    answer = ask(llama_8b(), LARGE, context_length=8192, generation_length=100)
    ms = STEP_MS + 8292 * TOKEN / 84e6
    flops = 2 * 8_030_261_248 * 8192 + 4 * 32 * 128 * 32 * 8192**2 / 2
    assert lines(answer) == [
        "decision|keep_fp16: fp16 (the engine's own cache is enough)",
        "layers|0 of 32 packed, 32 as the engine has them",
        "bytes|32 layers x 8 heads x 128 x 2 (K, V) x 16 bits x 8,448 slots / 8 = 1.03 GiB (kv)",
        "|1.03 GiB stored for 1 sequence, 1 of the engine's own 1.03 GiB",
        "|131,072 bytes more with each token of a sequence, 0 B that do not grow",
        "|1.06 GiB at the peak: 32 MiB more at the worst moment, with a prefill step of 2048",
        "|traced, confidence high (1.00)",
        (
            "fit|4.5 GiB weights + 1.06 GiB caches at the peak + 0 B other work + 512 MiB reserve = 6.06 GiB; "
            "43 GiB for caches, 41.9 GiB to spare"
        ),
        f"|largest context at the asked slots: {answer.chosen.fit.max_context_tokens:,} tokens",
        (
            f"decode|{ms:.3g} ms a token at 8,292 tokens ({0.55 * ms:.3g} to {1.5 * ms:.3g}), "
            f"{1000 / ms:.3g} tokens a second over all sequences"
        ),
        f"prefill|{8192 * 2.7e12 / flops:,.0f} tokens a second",
        "|analytic, confidence medium (0.50)",
        "|bandwidth: given",
        "quality|0 nats a token against the engine's own cache (0 to 0), perplexity +0",
        "|traced, confidence high (1.00)",
        "|the reference: by definition",
    ]
    assert told(answer) == {}


def test_a_packed_cache_that_is_the_best_that_fits() -> None:
    """4.5 bits of 16 are 0.281; scores of 32 heads x 128 x 131,072 x 2 bytes are 1 GiB. The range reaches fp16's ms."""
    answer = ask(llama_8b(), SMALL, context_length=131072)
    ms = STEP_MS + 131072 * TOKEN * 4.5 / 16 / 84e6
    own = STEP_MS + 131072 * TOKEN / 84e6
    found = lines(answer)
    largest = [line.split("a context of ")[1].split(" tokens")[0] for line in found if line.startswith("instead")]
    assert found == [
        "decision|quantize: affine4-g64 (a packed cache is the best that fits)",
        (
            "warning|affine4-g64 diverges by 0.051 nats a token (published, 0.0255 to 0.102); up to 0.02 passes "
            "without a warning at this context, and no variant that fits keeps within it; affine4-g32 (0.0328) fits "
            "too and counts as equal under balanced, where the fewer bytes are taken"
        ),
        (
            "warning|the prefill step is set to 128 (2048 asked): at the asked step the peak takes more memory than "
            "there is to spare"
        ),
        "warning|affine4-g64 was not tried on this model: no trace proves that the engine accepts it",
        f"instead|affine8-g128 fits a context of {largest[0]} tokens (0.0003 nats a token, prior)",
        f"instead|affine8-g64 fits a context of {largest[1]} tokens (0.0002 nats a token, published)",
        f"instead|affine8-g32 fits a context of {largest[2]} tokens (0.000137 nats a token, published)",
        f"instead|fp16 fits a context of {largest[3]} tokens (0 nats a token, traced)",
        "layers|32 of 32 packed, 0 as the engine has them",
        "bytes|32 layers x 8 heads x 128 x 2 (K, V) x 4.5 bits x 131,072 slots / 8 = 4.5 GiB (packed)",
        "|4.5 GiB stored for 1 sequence, 0.281 of the engine's own 16 GiB",
        "|36,864 bytes more with each token of a sequence, 0 B that do not grow",
        "|5.5 GiB at the peak: 1 GiB more at the worst moment, with a prefill step of 128",
        "|analytic, confidence medium (0.70)",
        "|not proven by a trace: the method's own word for which layers it can pack",
        (
            "fit|4.5 GiB weights + 5.5 GiB caches at the peak + 0 B other work + 512 MiB reserve = 10.5 GiB; "
            "6.8 GiB for caches, 1.3 GiB to spare"
        ),
        f"|largest context at the asked slots: {answer.chosen.fit.max_context_tokens:,} tokens",
        (
            f"decode|{ms:.3g} ms a token at 131,072 tokens ({0.55 * ms:.3g} to {own:.3g}), "
            f"{1000 / ms:.3g} tokens a second over all sequences"
        ),
        f"prefill|{answer.chosen.speed.prefill_tok_s:,.0f} tokens a second",
        "|analytic, confidence low (0.25)",
        "|bandwidth: given",
        "|a gain over the engine's own cache that was not measured on this machine",
        "quality|0.051 nats a token against the engine's own cache (0.0255 to 0.102)",
        "|published, confidence medium (0.70)",
        (
            "|Llama-3.2-3B: 0.051 nats (https://github.com/IonDen/mlx-quant-fidelity); 4-bit weights, M1 Max, packed "
            "from the first token"
        ),
    ]
    assert lines(answer, "fp16") == [
        (
            "out|fp16: does_not_fit, short by 9.69 GiB: caches take 16.5 GiB at their peak (16 GiB stored), 6.8 GiB "
            f"are left for them; the largest context that fits is {largest[3]}"
        )
    ]
    assert values(answer)["prefill_step_reduced"] == 128
    assert values(answer)["quality_below_soft_floor"] == 0.051


def test_windows_beside_packed_layers() -> None:
    """Of 24 layers of 4 heads of 256 each sixth is packed to 8.5 bits, the others keep 512 slots in 16."""
    answer = ask(windowed(), LARGE, context_length=4096, max_kl=10)
    found = lines(answer, "affine8-g64")
    assert found[:8] == [
        "layers|4 of 24 packed, 20 as the engine has them",
        "|20 layers keep the engine's sliding window, which does not grow beyond its size",
        "bytes|4 layers x 4 heads x 256 x 2 (K, V) x 8.5 bits x 4,096 slots / 8 = 34 MiB (packed)",
        "|20 layers x 4 heads x 256 x 2 (K, V) x 16 bits x 512 slots / 8 = 40 MiB (window)",
        "|74 MiB stored for 1 sequence, 0.712 of the engine's own 104 MiB",
        "|8,704 bytes more with each token of a sequence, 40 MiB that do not grow",
        # The last of 4,096 tokens is a call of its own, so that the second chunk has 2,047: with it 20 windows hold
        # 2,047 + 512 - 1 slots of 4 KiB, 2,046 more. Scores of 32 heads x 2,048 x 4,096 x 2 bytes are 512 MiB.
        (
            f"|{74 + 20 * 2046 / 256 + 512:.1f} MiB at the peak: {20 * 2046 / 256 + 512:.1f} MiB more at the worst "
            "moment, with a prefill step of 2048"
        ),
        "|traced, confidence high (1.00)",
    ]


def test_a_record_that_says_otherwise() -> None:
    """2 GiB at 8,192 tokens, twice the arithmetic, for each of two sequences; 60 ms for one of them."""
    seen = record("fp16", latency_ms_per_token=60.0, memory_bytes=2 * GIB)
    answer = ask(llama_8b(), LARGE, context_length=8192, records=[(0.9, seen)], on_offer=offers(Own()), batch_size=2)
    ms = 60 * (STEP_MS + 2 * 8192 * TOKEN / 84e6) / (STEP_MS + 8192 * TOKEN / 84e6)
    spread = 2 * 0.05 + 0.3 * (1 - 0.9)
    found = lines(answer)
    assert found[3:7] == [
        (
            f"|4 GiB stored for 2 sequences by record {seen.id}; the record wins over the arithmetic, 2 of the "
            "engine's own 2 GiB"
        ),
        "|262,144 bytes more with each token of a sequence, 0 B that do not grow",
        found[5],
        f"|measured by record {seen.id}, confidence high (0.90)",
    ]
    assert "|measured: 262,144 bytes a token; the arithmetic says 131,072" in found
    assert (
        f"decode|{ms:.3g} ms a token at 8,192 tokens ({ms * (1 - spread):.3g} to {ms * (1 + spread):.3g}), "
        f"{2000 / ms:.3g} tokens a second over all sequences"
    ) in found
    assert "|measured at context 8,192 and 1 sequences, moved to this workload by the roofline" in found


def test_records_are_cited_together() -> None:
    """Two that bracket the context give the bytes, and a rejection names both."""
    seen = [record("fp16", context_length=n, memory_bytes=2 * n * TOKEN) for n in (4096, 16384)]
    asked: dict[str, Any] = {"context_length": 8192, "on_offer": offers(Own()), "records": [(0.9, one) for one in seen]}
    both = "records fp16-4096, fp16-16384"
    told = f"|2 GiB stored for 1 sequence by {both}; the record wins over the arithmetic, 2 of the engine's own 1 GiB"
    assert told in lines(ask(llama_8b(), LARGE, **asked))
    assert f" by {both}, 1 GiB are left for them" in rejection(ask(llama_8b(), mac(16, 6), **asked), "fp16").detail


def test_weights_that_do_not_fit() -> None:
    """12 GiB and 0.5 of reserve are 0.7 GiB more than 11.8; 1,000 tokens take 128 MiB more, 12,928 MiB in all."""
    answer = ask(llama_8b(weights_bytes=12 * GIB), SMALL, context_length=1000, on_offer=offers(Own()))
    short = 12 * GIB + GIB // 2 - int(11.8 * GIB)
    assert lines(answer) == [
        "decision|weights_do_not_fit (the weights alone do not fit)",
        (
            "warning|weights of 12 GiB with 512 MiB kept in reserve and 0 B held by other work exceed 11.8 GiB by "
            "716.8 MiB: no cache choice helps"
        ),
        "instead|weights of 11.2 GiB or less would leave room (now 12 GiB)",
        (
            "instead|a GPU working set of 12,928 MiB would be enough and leaves 3.38 GiB for everything else: sudo "
            "sysctl iogpu.wired_limit_mb=12928 (it does not survive a restart)"
        ),
        (
            "out|fp16: does_not_fit, short by 844.8 MiB: caches take 128 MiB at their peak (128 MiB stored), 0 B are "
            "left for them; the largest context that fits is 0"
        ),
    ]
    assert values(answer) == {
        "weights_do_not_fit": short,
        "smaller_weights": 12 * GIB - short - GIB // 8,
        "raise_working_set": 12_928,
    }


def test_other_work_and_budgets_in_the_way() -> None:
    """50,000 tokens take 50,176 slots, 6.125 GiB, and scores of 8 heads more at the peak."""
    answer = ask(llama_8b(), mac(16, 11.8, active_bytes=6 * GIB), context_length=50_000, on_offer=offers(Own()))
    short = rejection(answer, "fp16").short_by_bytes
    assert told(answer)["free_memory"] == "other work holds 6 GiB; freeing 5.51 GiB of it would be enough"
    assert values(answer)["free_memory"] == short
    capped = ask(llama_8b(), LARGE, context_length=65536, budget=GIB, on_offer=offers(Own()))
    needed = GIB + (rejection(capped, "fp16").short_by_bytes or 0)
    assert told(capped)["raise_budget"] == "caches need 8.24 GiB"
    assert values(capped)["raise_budget"] == needed
    # 65,536 tokens store 8 GiB; the last growth copies 63,488 slots of 4 KiB in one layer.
    assert needed == 8 * GIB + 63_488 * 4096


def test_ceilings_that_keep_everything_out() -> None:
    """0.02 nats where 0.001 pass, and 54 ms, 29.7 at the least, where one does."""
    own = STEP_MS + 1024 * TOKEN / 84e6
    least, most = 0.55 * own, 1.5 * own
    variants = offers(Own(), Synthetic("four", 4, 0.02, fused=True))
    answer = ask(llama_8b(), LARGE, context_length=1024, on_offer=variants, max_kl=0.001, max_latency_ms=1)
    assert lines(answer)[1:] == [
        f"instead|fp16 fits and may take {least:.3g} ms a token, max_latency_ms is 1",
        "out|four: quality_below_floor: 0.02 nats a token (prior), max_kl is 0.001",
        f"out|fp16: too_slow: {own:.3g} ms a token (analytic, {least:.3g} to {most:.3g}), max_latency_ms is 1",
    ]
    rough = ask(llama_8b(), LARGE, context_length=1024, on_offer=variants, max_kl=0.001, methods=("four",))
    assert told(rough) == {"raise_max_kl": "four fits and diverges by 0.02 nats a token, max_kl is 0.001"}
    assert values(rough) == {"raise_max_kl": 0.02}


def test_variants_that_lose_to_others() -> None:
    """Above the floor of 0.02, above ten times it, and three times as slow: 100 ps for each of 2.6e9 numbers."""
    variants = offers(
        Own(),
        Synthetic("four", 4, 0.03, fused=True),
        Synthetic("slow", 8, 0.01, unpack=100.0, fused=True),
        Synthetic("rough", 2, 0.3, fused=True),
    )
    answer = ask(llama_8b(), LARGE, context_length=40_000, on_offer=variants)
    own, slow = (STEP_MS + 40_000 * TOKEN * share / 84e6 for share in (1, 0.5))
    slow += 40_000 * 32 * 8 * 256 * 100e-9
    assert {one.label: one.detail for one in answer.rejected} == {
        "four": "0.03 nats a token (prior), above 0.02 at this context, and another variant that fits is below",
        "rough": "0.3 nats a token (prior), more than ten times 0.02 at this context, and another variant that fits is "
        "below",
        "slow": f"{slow:.3g} ms a token (analytic), {slow / own:.2g} times the engine's own cache's; another variant "
        "that fits is quicker",
    }


def test_more_requests_than_were_asked_for() -> None:
    """8 of 40,000 tokens fit 43 GiB: 8 x 4.91 are 39.3, 9 would be 44.2. Each step then takes 8 caches' time more."""
    answer = ask(
        llama_8b(),
        LARGE,
        context_length=40_000,
        on_offer=offers(Own()),
        objective="throughput",
        num_concurrent_requests=2,
    )
    rate = 8000 / (STEP_MS + 8 * 40_000 * TOKEN / 84e6)
    assert told(answer) == {
        "more_slots": f"fp16 fits 8 requests side by side, about {rate:,.4g} tokens a second in all; 2 were asked for"
    }
    assert f"|throughput: {rate:,.4g} tokens a second over 8 slots that fit" in lines(answer)


def test_variants_that_drop_tokens() -> None:
    """1,024 slots of 4 bits in 32 layers of 2,048 numbers are 32 MiB, whatever the length."""
    drops = Counting("drop", 4, 0.001, step=64, bound=1024, fused=True)
    drops.drops_tokens = True
    refused = ask(llama_8b(), SMALL, context_length=250_000, on_offer=offers(Own(), drops))
    assert told(refused)["allow_eviction"] == (
        "drop would do if tokens may be dropped: a layer holds at most 1,024 of 250,000 (0.001 nats a token, prior)"
    )
    assert values(refused)["allow_eviction"] == "drop"
    assert rejection(refused, "drop").detail == "it drops tokens, and the request does not allow eviction"
    allowed = ask(llama_8b(), SMALL, context_length=250_000, on_offer=offers(drops), allow_eviction=True)
    found = lines(allowed)
    assert "drops|a layer holds at most 1,024 of 250,000 tokens; the others are gone" in found
    assert "|32 MiB stored for 1 sequence, 0.00102 of the engine's own 30.5 GiB" in found
    assert "|0 bytes more with each token of a sequence, 32 MiB that do not grow" in found
    assert told(allowed)["drops_tokens"] == (
        "drop drops tokens: a layer holds at most 1,024 of 250,000, and what is gone may be asked for"
    )
    assert values(allowed)["drops_tokens"] == 1024


def test_doubts_about_model_and_machine() -> None:
    """Each with its figure where it has one."""
    doubted = llama_8b(source="static", notes=("no engine here",), unkept="the trace is not kept", max_position=2000)
    answer = ask(doubted, mac(64, low_power_mode=True, gpu_cores=77), context_length=4000, on_offer=offers(Own()))
    assert told(answer) == {
        "model_not_traced": "the model was read from its config, not traced (no engine here): cache sizes are by rule",
        "trace_not_kept": "the trace is not kept",
        "context_beyond_model": "4,000 tokens are more than the 2,000 positions the model was made for",
        "gpu_cores_not_known": "no Apple M2 with 77 GPU cores is known: the speed figures are those of 10 GPU cores",
        "low_power_mode": "this machine is in low power mode: figures of full power are too fast for it",
    }
    assert {code: value for code, value in values(answer).items() if value is not None} == {
        "context_beyond_model": 2000,
        "gpu_cores_not_known": 10,
    }
    exactly = ask(llama_8b(max_position=4000, source="static"), LARGE, context_length=4000, on_offer=offers(Own()))
    assert told(exactly) == {
        "model_not_traced": "the model was read from its config, not traced: cache sizes are by rule"
    }


def test_doubts_about_speed() -> None:
    """What cannot be judged, and why; and an estimate whose range holds the ceiling: 65.3 ms, 35.9 to 98."""
    unknown = mac(64, backend="cuda", bandwidth_gbps=None, sources={"bandwidth_gbps": "no such chip"})
    answer = ask(llama_8b(), unknown, context_length=1000, max_latency_ms=10, on_offer=offers(Own()))
    why = "memory bandwidth is unknown: no such chip"
    assert told(answer) == {"latency_unknown": f"max_latency_ms cannot be judged: {why}"}
    assert "decode|unknown" in lines(answer)
    assert "|analytic, confidence low (0.00)" in lines(answer)
    unasked = ask(llama_8b(), unknown, context_length=1000, objective="latency", on_offer=offers(Own()))
    assert told(unasked) == {"speed_unknown": f"latency cannot be judged in time: {why}"}
    weightless = llama_8b(weights_bytes=None, read_bytes_per_token=None, weights_source="no file")
    (note,) = ask(
        weightless, LARGE, budget=GIB, context_length=1000, on_offer=offers(Own())
    ).chosen.speed.evidence.notes
    assert note == "weight bytes are unknown: no file"
    ms = STEP_MS + 8292 * TOKEN / 84e6
    near = ask(llama_8b(), LARGE, context_length=8192, generation_length=100, max_latency_ms=60, on_offer=offers(Own()))
    assert told(near)["latency_straddles_ceiling"] == (
        f"the estimate {0.55 * ms:.3g} to {1.5 * ms:.3g} ms a token straddles max_latency_ms"
    )
    assert values(near)["latency_straddles_ceiling"] == 1.5 * ms

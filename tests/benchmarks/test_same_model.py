"""Records of the asked model id that are of another model, told from honest ones by what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
from veloxquant.benchmarks.record_set import RecordSet
from veloxquant.benchmarks.same_model import is_namesake
from veloxquant.profiles import CacheLayer, CachePart, HardwareProfile, ModelProfile, WorkloadProfile
from veloxquant.profiles.slots import part_bytes, schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

M4 = HardwareProfile(chip="Apple M4", mlx_version="0.32.4")


def part(kind: str, heads: int, width: int, *, window: int = 0, itemsize: int = 2) -> CachePart:
    """K and V of `heads` heads of this width."""
    sizes = {"key_width": width, "value_width": width, "key_itemsize": itemsize, "value_itemsize": itemsize}
    return CachePart(kind=kind, engine_class="any", heads=heads, window=window, **sizes)  # type: ignore[arg-type]


def model(*layers: Sequence[CachePart], **fields: Any) -> ModelProfile:
    """A model in a folder called "model"."""
    made = tuple(CacheLayer(index=n, engine_class="any", parts=tuple(parts)) for n, parts in enumerate(layers))
    return ModelProfile(model_id="model", layers=made, **({"architecture": "llama"} | fields))


# Llama-3.2-1B keeps 32,768 bytes a token (16 layers of 8 KV heads of width 64), Llama-3.1-70B 327,680 (80 of 8 x 128).
ONE_B = model(*[[part("kv", 8, 64)]] * 16)
SEVENTY_B = model(*[[part("kv", 8, 128)]] * 80)
STATE = CachePart(kind="state", engine_class="any", state_bytes=1_000_000)
KINDS = {
    "full attention": ONE_B,
    "many heads": SEVENTY_B,
    "one head": model([part("kv", 1, 64)]),
    "windows": model(*[[part("window", 4, 64, window=1024)]] * 5, [part("kv", 4, 64)]),
    "chunks": model(*[[part("chunked", 4, 64, window=8192)]] * 3, [part("kv", 4, 64)]),
    "states": model(*[[STATE]] * 3, [part("kv", 2, 256)]),
    "states alone": model([STATE]),
    "a latent": model(
        [
            CachePart(
                kind="kv",
                engine_class="any",
                heads=1,
                key_width=512,
                value_width=64,
                key_itemsize=2,
                value_itemsize=2,
                latent=True,
            )
        ]
    ),
    "without slack": model([part("concat", 8, 64)]),
}
LENGTHS = st.integers(1, 1000) | st.integers(1, 200_000)
RUNS = {
    "generated": st.integers(0, 2048),
    "batch": st.integers(1, 8),
    "ratio": st.floats(0.1, 1.0),
    "digits": st.sampled_from((2, 3, 17)),
}


def run(of: ModelProfile, context: int, *, ratio: float = 0.28, digits: int = 17, **how: int) -> BenchmarkRecord:
    """What a program that measured this model writes down: bytes by the engine's own slots, and their ratio.

    How: tokens `generated` in all, and `held` of them at the reading; sequences in a `batch`; prefill `step` in tokens.
    """
    generated, batch, step = how.get("generated", 512), how.get("batch", 1), how.get("step", 2048)
    calls = schedule(context, how.get("held", generated), step)
    baseline = batch * sum(part_bytes(one, calls) for layer in of.layers for one in layer.parts)
    workload = WorkloadProfile(
        context_length=context, generation_length=generated, batch_size=batch, prefill_step_size=step
    )
    figures = int(baseline * ratio), round(ratio, digits)
    return BenchmarkRecord("r", "affine4-g64", "model", "llama", context, batch, *figures, workload=workload)


@given(
    st.sampled_from(sorted(KINDS)),
    LENGTHS,
    st.fixed_dictionaries(RUNS | {"step": st.integers(1, 8192)}, optional={"held": st.just(0)}),
)
def test_a_record_of_the_model_itself_is_never_refused(kind: str, context: int, how: dict[str, Any]) -> None:
    """Any length, batch, prefill step and ratio, rounded to two digits or not; read after the prompt or at the end."""
    assert not is_namesake(run(KINDS[kind], context, **how), KINDS[kind])


@given(
    st.sampled_from(("full attention", "many heads", "one head", "a latent")),
    LENGTHS,
    st.integers(2, 40),
    st.fixed_dictionaries(RUNS),
)
def test_a_record_of_a_larger_cache_is_always_refused(kind: str, context: int, times: int, how: dict[str, Any]) -> None:
    """Twice the layers or more, read at the end of the run: refused whatever the lengths."""
    larger = model(*(layer.parts for layer in KINDS[kind].layers * times))
    assert is_namesake(run(larger, context, **how), KINDS[kind])


@given(st.integers(16_384, 200_000), st.integers(2, 40), st.fixed_dictionaries(RUNS, optional={"held": st.just(0)}))
def test_a_record_of_a_smaller_cache_is_refused_for_long_prompts(context: int, times: int, how: dict[str, Any]) -> None:
    """From eight times what is generated on. Below that, half the bytes a token may be half the tokens."""
    larger = model(*(layer.parts for layer in ONE_B.layers * times))
    assert is_namesake(run(ONE_B, context, **how), larger)


def test_two_folders_of_one_name() -> None:
    """No tag, no size in the name: the figures tell 1B and 70B apart, from either side, and the plan sees none."""
    for own, other in ((ONE_B, SEVENTY_B), (SEVENTY_B, ONE_B)):
        asked = WorkloadProfile(context_length=4096)
        for of, expected in ((own, 1), (other, 0)):
            record = replace(run(of, 4096), chip="Apple M4", mlx_version="0.32.4")
            assert len(RecordSet([record]).matches("affine4-g64", own, asked, M4)) == expected
            assert len(RecordSet([record]).at_any_length("affine4-g64", own, M4)) == expected


@pytest.mark.parametrize(
    ("theirs", "ours", "other"),
    [
        ("qwen2", "llama", True),
        ("qwen3", "qwen3_moe", True),
        ("Llama", "llama", False),
        ("LlamaForCausalLM", "llama", False),
        ("Qwen2MoeForCausalLM", "qwen2_moe", False),
        ("gemma3_text", "gemma3", False),
        ("unknown", "llama", False),
        ("", "llama", False),
        ("llama", "unknown", False),
    ],
)
def test_another_architecture_is_another_model(theirs: str, ours: str, other: bool) -> None:
    """Where both say theirs, however it is spelt."""
    record = BenchmarkRecord("r", "affine4-g64", "model", theirs, throughput_tok_s=30.0)
    assert is_namesake(record, ModelProfile(model_id="model", architecture=ours)) is other


def test_what_tells_no_size_is_believed() -> None:
    """A record of speed alone, of bytes without a ratio, or for a model whose layers are unknown."""
    plain = BenchmarkRecord("r", "affine4-g64", "model", "llama", throughput_tok_s=30.0)
    assert not is_namesake(plain, ONE_B)
    assert not is_namesake(replace(plain, memory_bytes=10**12), ONE_B)
    assert not is_namesake(replace(plain, memory_reduction=0.28), ONE_B)
    assert not is_namesake(run(SEVENTY_B, 4096), model())


def test_what_evicts_is_measured_against_the_whole_cache() -> None:
    """A window of 1,024 in 131,072 holds 0.0078 of it, which two digits make 0.01."""
    of = run(ONE_B, 131_072, ratio=1024 / 131_072, digits=2)
    assert of.memory_reduction == 0.01
    assert not is_namesake(of, ONE_B)
    assert is_namesake(replace(of, memory_bytes=10 * of.memory_bytes), ONE_B)


def test_a_tag_says_how_many_tokens_were_held() -> None:
    """A prompt cut short: 1,024 tokens of 8,192, as the planner reads it too; without the tag it is another model."""
    cut = replace(run(ONE_B, 1024, generated=0), context_length=8192)
    assert is_namesake(cut, ONE_B)
    assert not is_namesake(replace(cut, tags=["tokens=1024"]), ONE_B)
    assert is_namesake(replace(run(SEVENTY_B, 1024, generated=0), tags=["tokens=1024"]), ONE_B)


def test_a_model_in_32_bit_may_be_measured_against_16_bit() -> None:
    """The ratio is to the 16-bit cache; the engine's own has twice the bytes there."""
    wide = model(*[[part("kv", 8, 64, itemsize=4)]] * 16)
    assert not is_namesake(run(ONE_B, 8192), wide)
    assert not is_namesake(run(wide, 8192), wide)


def test_windows_fed_in_one_piece_are_as_long_as_the_prompt() -> None:
    """A rotating cache keeps a first chunk whole: a prompt given at once is all there when the bytes are read."""
    windows = KINDS["windows"]
    whole = model(*[[part("kv", 4, 64)]] * 6)
    assert not is_namesake(run(whole, 32_768), windows)

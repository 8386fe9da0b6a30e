"""Profiled caches in mlx-lm's own hands: models, generation, batches, drafts, saved prompts, the server's store."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from veloxquant.caches.held import held_bytes
from veloxquant.profiling import MLXCacheProfiler, profile_layers, unwrapped

if TYPE_CHECKING:
    from pathlib import Path

ARCHS = {
    "llama": {"KVCache"},
    "gemma3": {"RotatingKVCache", "KVCache"},
    "gemma3n": {"RotatingKVCache", "KVCache"},  # later layers read the caches of earlier ones
    "gpt_oss": {"RotatingKVCache", "KVCache"},  # sinks
    "llama4": {"ChunkedKVCache", "KVCache"},
    "deepseek_v3": {"KVCache"},  # latents: K and V of unlike widths
    "deepseek_v32": {"CacheList"},  # latents and index keys in one entry
    "falcon_h1": {"CacheList"},  # states beside keys and values in one entry
    "qwen3_next": {"ArraysCache", "KVCache"},
    "plamo2": {"ArraysCache", "KVCache"},
    "kimi_linear": {"ArraysCache", "KVCache"},
}
CALLS = (14, 5, 1, 1)


def profiled(model: Any) -> list[Any]:
    """The model's own caches, each in a wrapper."""
    return [MLXCacheProfiler(cache, layer) for layer, cache in enumerate(make_prompt_cache(model))]


def logits(model: Any, caches: list[Any]) -> mx.array:
    """All logits of two prompt chunks and two steps."""
    made = []
    for number, tokens in enumerate(CALLS):
        made.append(model((mx.arange(tokens) * 7 + number)[None] % 50, cache=caches)[0])
        mx.eval(made[-1], [cache.state for cache in caches])
    return mx.concatenate(made)


def prompt(length: int) -> mx.array:
    """Some tokens."""
    return (mx.arange(length) * 5 + 1) % 50


def greedy(model: Any, caches: list[Any] | None, length: int = 20, **options: Any) -> list[int]:
    """Twelve tokens from mlx-lm's own loop, in chunks of eight."""
    steps = generate_step(prompt(length), model, max_tokens=12, prompt_cache=caches, prefill_step_size=8, **options)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", ARCHS)
def test_a_profiled_run_gives_the_same_logits_and_holds_the_same(name: str, tiny: Any) -> None:
    """Bit by bit, and layer by layer the bytes that the walk finds in the plain run."""
    model = tiny(name)
    plain, caches = make_prompt_cache(model), profiled(model)
    assert {type(cache).__name__ for cache in caches} == ARCHS[name]
    expected, got = logits(model, plain), logits(model, caches)
    assert bool(mx.all(mx.isfinite(expected)))
    assert mx.array_equal(expected, got)
    report = profile_layers(caches, 1.0)
    assert [layer.resident_bytes for layer in report.layers] == [held_bytes(cache) for cache in plain]
    assert not any(layer.is_lying for layer in report.layers)
    assert report.sequence_tokens == sum(CALLS)


def test_layers_that_store_keys_count_each_call(tiny: Any) -> None:
    """Four calls, 21 tokens; a hybrid's recurrent layers count bytes alone."""
    caches = profiled(tiny("qwen3_next"))
    logits(tiny("qwen3_next"), caches)
    for cache in caches:
        profile = cache.profile()
        recurrent = type(cache).__name__ == "ArraysCache"
        assert (profile.n_quantize_calls, profile.tokens_written) == ((0, 0) if recurrent else (4, 21))
        assert profile.peak_resident_bytes >= profile.resident_bytes > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_generation_takes_a_profiled_list(name: str, tiny: Any) -> None:
    """The same tokens through mlx-lm's loop, prompt chunks and look-ahead included."""
    model = tiny(name)
    assert greedy(model, profiled(model)) == greedy(model, None)


def test_kv_bits_converts_a_profiled_list(tiny: Any) -> None:
    """From the eighth token on packed, as without profiling, and still counted."""
    model, options = tiny("llama"), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8}
    caches = profiled(model)
    assert greedy(model, caches, **options) == greedy(model, None, **options)
    assert all(isinstance(cache, MLXCacheProfiler) and isinstance(cache, QuantizedKVCache) for cache in caches)
    assert caches[0].profile().tokens_written == caches[0].offset


def test_speculative_decoding_takes_a_profiled_list(tiny: Any) -> None:
    """The model drafts for itself; trimming rejected drafts reaches the caches."""
    model = tiny("llama")

    def run(caches: list[Any]) -> tuple[list[int], list[int]]:
        steps = speculative_generate_step(prompt(20), model, model, max_tokens=12, prompt_cache=caches)
        return [int(token) for token, _, _ in steps], [cache.offset for cache in caches]

    plain = make_prompt_cache(model) + make_prompt_cache(model)
    assert run(profiled(model) + profiled(model)) == run(plain)


def batch(model: Any, histories: list[Any], lengths: tuple[int, ...]) -> tuple[list[list[int]], list[Any]]:
    """Six tokens after each prompt from one BatchGenerator: (tokens of each, caches that came with the last)."""
    generator = BatchGenerator(model, max_tokens=6, prefill_step_size=4)
    uids = generator.insert([prompt(length).tolist() for length in lengths], caches=histories)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    finished: dict[int, Any] = {}
    while answers := generator.next_generated():
        for answer in answers:
            tokens[answer.uid].append(answer.token)
            if answer.finish_reason is not None:
                finished[answer.uid] = answer.prompt_cache
    generator.close()
    return [tokens[uid] for uid in uids], finished[uids[-1]]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v32"])
def test_a_batch_takes_profiled_caches_with_histories(name: str, tiny: Any) -> None:
    """Prompts of unlike lengths, the last after nine tokens of history: tokens of each row as without profiling."""
    model, made = tiny(name), []
    for fresh in (make_prompt_cache, profiled):
        histories = [fresh(model) for _ in range(3)]
        model(prompt(9)[None], cache=histories[2])
        made.append(batch(model, histories, (5, 11, 3)))
    assert made[0][0] == made[1][0]
    assert all(isinstance(cache, MLXCacheProfiler) for cache in made[1][1])


@pytest.mark.parametrize(("name", "calls"), [("llama", 1), ("gemma3", 1), ("deepseek_v32", 2)])
def test_each_finished_sequence_brings_the_figures_of_its_batch(name: str, calls: int, tiny: Any) -> None:
    """11 prompt tokens and a step for each of 6 made, the last ahead; latents and index keys are two updates."""
    model = tiny(name)
    _, finished = batch(model, [profiled(model) for _ in range(3)], (11, 11, 11))
    for cache in finished:
        profile = cache.batch_profile()
        assert (profile.tokens_written, profile.sequence_tokens) == (calls * 17, 17)
        assert profile.peak_resident_bytes >= profile.resident_bytes > 0
        assert profile.resident_ratio > 0


def test_a_live_batch_is_made_of_profiled_batch_caches(tiny: Any) -> None:
    """What the engine calls in each step is a wrapper of its batch class."""
    model = tiny("llama")
    merged = profiled(model)[0].merge([profiled(model)[0], profiled(model)[0]])
    assert isinstance(merged, BatchKVCache)
    assert isinstance(merged, MLXCacheProfiler)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_a_saved_profiled_list_loads_without_this_package(name: str, tiny: Any, tmp_path: Path) -> None:
    """mlx-lm finds its own classes, in this process and in one that cannot import veloxquant, and goes on."""
    model = tiny(name)
    caches = profiled(model)
    model(prompt(20)[None], cache=caches)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [type(unwrapped(cache)) for cache in caches]
    step = mx.array([[3]])
    assert mx.array_equal(model(step, cache=loaded), model(step, cache=caches))
    if name == "llama":
        assert alone(file) == f"KVCache {len(caches)} 20"


def alone(file: str) -> str:
    """The file loaded where importing this package fails: class, number and offset of what comes out."""
    code = (
        "import sys; sys.modules['veloxquant'] = None\n"
        "from mlx_lm.models.cache import load_prompt_cache\n"
        f"made = load_prompt_cache({file!r})\n"
        "print(type(made[0]).__name__, len(made), made[0].offset)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_loaded_list_can_be_profiled_and_restored_into(tiny: Any, tmp_path: Path) -> None:
    """`state` is set through the wrapper as mlx-lm sets it."""
    model = tiny("llama")
    caches = profiled(model)
    model(prompt(20)[None], cache=caches)
    others = profiled(model)
    for other, cache in zip(others, caches, strict=True):
        other.state = cache.state
    assert [other.offset for other in others] == [20] * len(others)
    assert others[0].profile().resident_bytes == caches[0].profile().resident_bytes
    assert others[0].profile().n_quantize_calls == 0


def test_prompts_are_trimmed(tiny: Any) -> None:
    """mlx-lm's two functions answer as for plain caches."""
    model = tiny("llama")
    caches = profiled(model)
    model(prompt(20)[None], cache=caches)
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 6) == 6
    assert [cache.offset for cache in caches] == [14] * len(caches)
    assert not can_trim_prompt_cache(profiled(tiny("qwen3_next")))


def test_the_servers_store_keeps_profiled_prompts(tiny: Any) -> None:
    """Insertion counts their bytes; what is fetched is a profiled copy, trimmed to the common prefix."""
    model = tiny("llama")
    caches = profiled(model)
    model(mx.arange(20)[None], cache=caches)
    store = LRUPromptCache(max_size=2)
    store.insert_cache("model", list(range(20)), caches)
    assert store.nbytes == held_bytes(caches)
    fetched, rest = store.fetch_nearest_cache("model", [*range(12), 40, 41])
    assert (fetched[0].offset, rest) == (12, [40, 41])
    assert isinstance(fetched[0], MLXCacheProfiler)
    assert caches[0].offset == 20


def test_a_list_may_mix_profiled_and_plain_caches(tiny: Any) -> None:
    """One layer is looked at, the others run free."""
    model = tiny("llama")
    mixed = make_prompt_cache(model)
    mixed[1] = MLXCacheProfiler(mixed[1], 1)
    assert mx.array_equal(logits(model, mixed), logits(model, make_prompt_cache(model)))
    assert mixed[1].profile().n_quantize_calls == len(CALLS)


def test_profiled_parts_inside_a_composite_are_saved_by_their_class() -> None:
    """CacheList records the class names of its parts."""
    parts = CacheList(MLXCacheProfiler(KVCache()), MLXCacheProfiler(QuantizedKVCache(64, 4)))
    assert [name for _, name in parts.state] == ["KVCache", "QuantizedKVCache"]
    assert copy.deepcopy(parts)[0].offset == 0

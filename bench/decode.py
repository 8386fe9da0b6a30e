"""Decode speed of every method installed, beside float attention and mlx-lm's own quantized cache: `make decode`.

    python bench/decode.py                                    attention at 4,096 and 16,384 tokens, and a whole model
    python bench/decode.py --only kivi affine4-g64 --rounds 15
    python bench/decode.py --part attention --tokens 16384 --json decode.json

Attention is that of Llama-3.1-8B (32 query heads over 8 KV heads of width 128), one query, K and V random; the model
has 8 layers, hidden size 2,048, 16 query heads over 4 KV heads of width 128 and random weights. All in float32 on the
CPU backend, where 16-bit products of packed numbers are emulated.

Contenders take turns, one step each, round after round, so that what else the machine does falls on all of them; what
is shown is the median, and ratios are medians of the rounds' own ratios. A method that chooses bits by a calibration
is given a made-up one, in which later layers and heads mind less. The load of the machine stands below the
table. mlx-lm's cache is the one (groups of 64) with at least as many stored bits as the method has in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from veloxquant.caches.held import held_bytes
from veloxquant.errors import VeloxError
from veloxquant.measure.conformance.models import made_up
from veloxquant.methods import CachePart, LayerSpec
from veloxquant.methods.per_layer import for_layer, layer_params
from veloxquant.methods.registry import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from veloxquant.methods import Method, Variant

SCHEMA = "veloxquant.decode.v1"
FLOAT = "float32, fused"
ENGINE_BITS = (8, 4, 3, 2)
"""Of a fresh QuantizedKVCache of width 128: 5 and 6 bits break there (docs/engine.md)."""
CHUNK = 512
"""Tokens a call while caches are filled."""


@dataclass(frozen=True)
class Shape:
    """Of one layer's attention."""

    heads: int = 8
    repeats: int = 4
    width: int = 128
    layers: int = 1

    @property
    def part(self) -> CachePart:
        """As a method is told of it, in the 16-bit format that stored bits are counted in."""
        return CachePart(
            kind="kv",
            engine_class="KVCache",
            heads=self.heads,
            key_width=self.width,
            value_width=self.width,
            key_itemsize=2,
            value_itemsize=2,
            dtype="float16",
        )


SHAPES = {"attention": Shape(), "model": Shape(heads=4, layers=8)}


@dataclass
class Contender:
    """Somebody's caches. `bits` stored for a number, in 16 bits; None for the float cache."""

    label: str
    bits: float | None
    make: Callable[[int], Any]
    """A fresh cache for a layer."""
    attends: bool = False
    """Attention is part of filling: it decides which tokens stay."""


@dataclass(frozen=True)
class Row:
    """One contender at one length."""

    part: str
    tokens: int
    label: str
    bits: float | None
    median_ms: float
    bytes: int
    """Held after the last step."""
    over_float: float
    """How many times as fast as float attention."""
    over_engine: float | None
    """The same against mlx-lm's quantized cache of at least as many bits."""
    engine: str | None


def contenders(shape: Shape, only: Sequence[str], first: bool) -> Iterator[Contender]:
    """Float, mlx-lm's quantized cache, and every variant that is planned with; `first`: one for each method."""
    yield Contender(FLOAT, None, lambda _: KVCache())
    for bits in ENGINE_BITS:
        yield Contender(f"mlx-lm {bits} bits", bits + 0.5, _engine_cache(bits))
    seen: set[str] = set()
    for method, variant in load().variants:
        wanted = any(text in variant.label for text in only) if only else not (first and method.name in seen)
        # The engine's own format stands there already, and groups of 64 stand for those of 32 and 128.
        if wanted and method.name != "fp16" and (only or method.name != "affine"):
            seen.add(method.name)
            made = _contender(shape, method, variant)
            if made is not None:
                yield made


def _engine_cache(bits: int) -> Callable[[int], Any]:
    return lambda _: QuantizedKVCache(64, bits)


def _contender(shape: Shape, method: Method, variant: Variant) -> Contender | None:
    """None, and a line on stderr, for what cannot be built for this shape."""
    part, bits = shape.part, 0.0
    parts = dict.fromkeys(range(shape.layers), part)
    own: list[Variant] = []

    def make(index: int) -> Any:
        return method.build(LayerSpec(index=index, part=part), own[index])

    try:
        chosen = layer_params(method, variant, parts, made_up("bench", "llama", "", parts))
        own += [for_layer(variant, params) for params in chosen] or [variant] * shape.layers
        why = next((said[1] for one in own if (said := method.refuses(one, part)) is not None), "")
        if not why:
            bits = statistics.fmean((method.key_bits(one, part) + method.value_bits(one, part)) / 2 for one in own)
            make(0)
    except VeloxError as error:
        why = str(error)
    if why:
        print(f"left out: {variant.label}: {why}", file=sys.stderr)
        return None
    return Contender(variant.label, bits, make, attends=method.drops_tokens)


def fill(contender: Contender, shape: Shape, tokens: int) -> list[Any]:
    """Caches that hold so many random tokens, the same for every contender."""
    caches = [contender.make(layer) for layer in range(shape.layers)]
    for start in range(0, tokens, CHUNK):
        for layer, cache in enumerate(caches):
            seed = mx.random.split(mx.random.key(start * shape.layers + layer), 3)
            count = min(CHUNK, tokens - start)
            keys, values = (mx.random.normal((1, shape.heads, count, shape.width), key=key) for key in seed[:2])
            handles = cache.update_and_fetch(keys, values)
            if contender.attends:
                queries = mx.random.normal((1, shape.heads * shape.repeats, count, shape.width), key=seed[2])
                mx.eval(scaled_dot_product_attention(queries, *handles, cache, shape.width**-0.5, "causal"))
            mx.eval(cache.state)
    return caches


def attention_step(shape: Shape) -> Callable[[list[Any]], float]:
    """Milliseconds of one query's attention; writing the token is not counted."""
    width = (1, shape.heads, 1, shape.width)
    key, query = mx.random.normal(width), mx.random.normal((1, shape.heads * shape.repeats, 1, shape.width))
    mx.eval(key, query)

    def step(caches: list[Any]) -> float:
        handles = caches[0].update_and_fetch(key, key)
        mx.eval(caches[0].state)
        start = time.perf_counter()
        mx.eval(scaled_dot_product_attention(query, *handles, caches[0], shape.width**-0.5, None))
        return (time.perf_counter() - start) * 1e3

    return step


def model_step(shape: Shape, hidden: int = 2048, vocabulary: int = 8192) -> Callable[[list[Any]], float]:
    """Milliseconds of one token through a whole model."""
    mx.random.seed(0)
    heads = shape.heads * shape.repeats
    made = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.width,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
    )
    model = llama.Model(made)
    mx.eval(model.parameters())

    def step(caches: list[Any]) -> float:
        start = time.perf_counter()
        mx.eval(model(mx.array([[1]]), cache=caches), [cache.state for cache in caches])
        return (time.perf_counter() - start) * 1e3

    return step


def measure(
    part: str, tokens: int, who: Sequence[Contender], step: Callable[[list[Any]], float], rounds: int
) -> list[Row]:
    """All contenders filled, then `rounds` rounds of a step each; a first round is not counted."""
    held = [fill(contender, SHAPES[part], tokens) for contender in who]
    taken: list[list[float]] = [[] for _ in who]
    for at in range(rounds + 1):
        for caches, times in zip(held, taken, strict=True):
            took = step(caches)
            if at:
                times.append(took)
    by_label = {contender.label: times for contender, times in zip(who, taken, strict=True)}
    rows = []
    for contender, caches, times in zip(who, held, taken, strict=True):
        engine = _engine(contender, by_label)
        rows.append(
            Row(
                part=part,
                tokens=tokens,
                label=contender.label,
                bits=contender.bits,
                median_ms=statistics.median(times),
                bytes=held_bytes(caches),
                over_float=_ratio(by_label[FLOAT], times),
                over_engine=None if engine is None else _ratio(by_label[engine], times),
                engine=engine,
            )
        )
    return rows


def _ratio(base: Sequence[float], times: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(base, times, strict=True))


def _engine(contender: Contender, known: dict[str, Any]) -> str | None:
    """mlx-lm's cache of the fewest bits that are no fewer; its widest where the method has more."""
    if contender.bits is None:
        return None
    fitting = [bits for bits in ENGINE_BITS if bits + 0.5 >= contender.bits - 0.01] or [max(ENGINE_BITS)]
    label = f"mlx-lm {min(fitting)} bits"
    return label if label in known else None


def table(rows: Sequence[Row]) -> str:
    """Markdown, one table for each part and length."""
    lines: list[str] = []
    for part, tokens in dict.fromkeys((row.part, row.tokens) for row in rows):
        unit = "ms a query" if part == "attention" else "tokens/s"
        lines += ["", f"### {part}, {tokens:,} tokens", ""]
        lines += [
            f"| caches | stored bits | {unit} | MiB held | x float | x mlx-lm | of |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if (row.part, row.tokens) == (part, tokens):
                speed = f"{row.median_ms:.1f}" if part == "attention" else f"{1e3 / row.median_ms:.2f}"
                bits = "32" if row.bits is None else f"{row.bits:.2f}"
                engine = "" if row.over_engine is None else f"{row.over_engine:.2f}"
                cells = (row.label, bits, speed, f"{row.bytes / 2**20:.1f}", f"{row.over_float:.2f}", engine)
                lines.append(f"| {' | '.join(cells)} | {row.engine or ''} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where this ran."""
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    chip = dict(mx.device_info(mx.cpu)).get("device_name", platform.processor())
    return {"chip": str(chip), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--part", choices=("attention", "model", "both"), default="both")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--only", nargs="+", default=[], help="variants whose label contains one of these")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    asked = parser.parse_args(arguments)
    mx.set_default_device(mx.cpu)
    before, rows = os.getloadavg(), []
    for part in [asked.part] if asked.part != "both" else list(SHAPES):
        shape = SHAPES[part]
        step = attention_step(shape) if part == "attention" else model_step(shape)
        who = list(contenders(shape, asked.only, first=part == "model"))
        for tokens in asked.tokens:
            rows += measure(part, tokens, who, step, asked.rounds)
            print(table(rows[-len(who) :]), flush=True)
            mx.clear_cache()
    where = machine()
    load_average = {"before": before[0], "after": os.getloadavg()[0]}
    print(f"\n{where}; load average {load_average['before']:.1f} before, {load_average['after']:.1f} after")
    if asked.json is not None:
        found = {"schema": SCHEMA, "machine": where, "load_average": load_average, "rounds": asked.rounds}
        text = json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1)
        asked.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

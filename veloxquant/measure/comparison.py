"""Several methods on one model, one prompt and one machine, each beside the engine's own cache of the same session.

All have the same length: as many tokens as the engine's own cache generated, which may end at an end-of-text token. The
others do not stop at their own, so that bytes, times and ratios compare; what they wrote is shown up to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import VeloxError
from veloxquant.measure import conditions as surroundings
from veloxquant.measure.conditions import Conditions
from veloxquant.measure.measurement import Run, Subject, run
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from veloxquant.measure.generation import Watch


_HALVES = {"float16", "bfloat16"}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A method that could not be measured; the others were."""

    label: str
    method: str
    planned: bool = False
    error: str
    """Stable name of one of our errors, else the class of what was raised."""
    message: str
    hint: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, in the order asked for."""

    conditions: Conditions
    prompt_tokens: int
    max_tokens: int
    runs: tuple[Run, ...] = ()
    failures: tuple[Failure, ...] = ()
    process_bytes: int = 0
    """Matrices of TurboQuant that this process held afterwards: once, whatever the layers, and in no cache's bytes."""

    @property
    def generated_tokens(self) -> int | None:
        """Tokens after the prompt, of every run; None where nothing ran."""
        return self.runs[0].generated_tokens if self.runs else None

    @property
    def baseline(self) -> Run | None:
        """The engine's own cache in the same comparison, None where it was not run or failed."""
        return next((one for one in self.runs if one.label == ENGINE_OWN), None)

    @property
    def is_wide(self) -> bool:
        """Whether the engine's own cache kept no number in 16 bits, as the model computes in 32."""
        base = self.baseline
        return base is not None and "float32" in base.number_types and not _HALVES & set(base.number_types)

    @property
    def fp16_cache_bytes(self) -> int | None:
        """What the engine's own cache takes with 16 bits a number of K and V, unused slots included.

        Of the same comparison, where it keeps none in float32; recurrent states stay as they are. None without one.
        """
        base = self.baseline
        return None if base is None else base.resident_bytes - base.float32_kv_bytes // 2

    def ratio_to_fp16_run(self, one: Run) -> float | None:
        """Resident bytes over those of the engine's own cache in the same comparison; None without a baseline."""
        base = self.baseline
        return None if base is None else _ratio(one.resident_bytes, base.resident_bytes)

    def memory_reduction(self, one: Run) -> float | None:
        """Resident bytes over `fp16_cache_bytes`, as records have it; None without a baseline."""
        return _ratio(one.resident_bytes, self.fp16_cache_bytes)

    def agreeing_tokens(self, one: Run) -> int | None:
        """How many of its first tokens are those of the engine's own cache; None without a baseline."""
        base = self.baseline
        return None if base is None else agreeing(base.tokens, one.tokens)

    def same_text(self, one: Run) -> bool | None:
        """Whether it generated just what the engine's own cache did; None without a baseline."""
        base = self.baseline
        return None if base is None else base.tokens == one.tokens


def _ratio(ours: int, theirs: int | None) -> float | None:
    return ours / theirs if theirs else None


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def compare(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    subjects: Sequence[Subject],
    *,
    max_tokens: int,
    watch: Callable[[Subject, int], None] | None = None,
) -> Comparison:
    """Run each subject in turn, the engine's own cache first. One that fails becomes a Failure, and the rest go on.

    The first that does not fail sets the length. `watch` is told the subject at work and how many tokens of all runs
    are done, out of len(subjects) x 2 x (prompt + max_tokens).
    """
    from veloxquant.caches.rotation import process_bytes

    found = surroundings.now()
    ended: dict[int, Run | Failure] = {}
    length: int | None = None
    for number, at in enumerate(sorted(range(len(subjects)), key=lambda at: subjects[at].label != ENGINE_OWN)):
        subject = subjects[at]
        told = _telling(watch, subject, number * 2 * (len(prompt) + max_tokens))
        try:
            most, stops = length or max_tokens, length is None
            done = run(model, tokenizer, prompt, subject, max_tokens=most, stops=stops, watch=told)
            ended[at], length = done, done.generated_tokens
        except VeloxError as error:
            ended[at] = _failure(subject, error.name, error.message, error.hint)
        except Exception as error:  # noqa: BLE001 -- the fence: caches are a plugin's, and MLX raises what it likes
            ended[at] = _failure(subject, type(error).__name__, str(error) or type(error).__name__)
    in_order = [one for _, one in sorted(ended.items())]
    return Comparison(
        conditions=found,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        runs=tuple(one for one in in_order if isinstance(one, Run)),
        failures=tuple(one for one in in_order if isinstance(one, Failure)),
        process_bytes=process_bytes(),
    )


def _telling(watch: Callable[[Subject, int], None] | None, subject: Subject, begun: int) -> Watch | None:
    return None if watch is None else lambda done: watch(subject, begun + done)


def _failure(subject: Subject, error: str, message: str, hint: str = "") -> Failure:
    return Failure(
        label=subject.label, method=subject.method, planned=subject.planned, error=error, message=message, hint=hint
    )

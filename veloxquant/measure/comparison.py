"""Several methods on one model, one prompt and one machine, each beside the engine's own cache of the same session."""

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

    @property
    def baseline(self) -> Run | None:
        """The engine's own cache in this session, None where it was not run or failed."""
        return next((one for one in self.runs if one.label == ENGINE_OWN), None)

    @property
    def is_wide(self) -> bool:
        """Whether the engine's own cache kept no number in 16 bits, as the model computes in 32."""
        base = self.baseline
        return base is not None and "float32" in base.number_types and not _HALVES & set(base.number_types)

    def reduction(self, one: Run) -> float | None:
        """Resident bytes over those of the engine's own cache in this session; None without a baseline."""
        base = self.baseline
        return one.resident_bytes / base.resident_bytes if base is not None and base.resident_bytes else None

    def agreeing_tokens(self, one: Run) -> int | None:
        """How many of its first tokens are those of the engine's own cache; None without a baseline."""
        base = self.baseline
        return None if base is None else agreeing(base.tokens, one.tokens)

    def same_text(self, one: Run) -> bool | None:
        """Whether it generated just what the engine's own cache did; None without a baseline."""
        base = self.baseline
        return None if base is None else base.tokens == one.tokens


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
    """Run each subject in turn. One that fails becomes a Failure, and the rest go on.

    `watch` is told the subject at work and how many tokens of all runs are done, out of
    len(subjects) x 2 x (prompt + max_tokens).
    """
    found = surroundings.now()
    runs, failures = [], []
    for number, subject in enumerate(subjects):
        begun = number * 2 * (len(prompt) + max_tokens)
        told = _telling(watch, subject, begun)
        try:
            runs.append(run(model, tokenizer, prompt, subject, max_tokens=max_tokens, watch=told))
        except VeloxError as error:
            failures.append(_failure(subject, error.name, error.message, error.hint))
        except Exception as error:  # noqa: BLE001 -- the fence: caches are a plugin's, and MLX raises what it likes
            failures.append(_failure(subject, type(error).__name__, str(error) or type(error).__name__))
    return Comparison(
        conditions=found,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        runs=tuple(runs),
        failures=tuple(failures),
    )


def _telling(watch: Callable[[Subject, int], None] | None, subject: Subject, begun: int) -> Watch | None:
    return None if watch is None else lambda done: watch(subject, begun + done)


def _failure(subject: Subject, error: str, message: str, hint: str = "") -> Failure:
    return Failure(
        label=subject.label, method=subject.method, planned=subject.planned, error=error, message=message, hint=hint
    )

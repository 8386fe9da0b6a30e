"""What one call of `profile` found, as a value: the JSON object, and what the table and the page are made of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import msgspec

from veloxquant.measure.comparison import Comparison

if TYPE_CHECKING:
    from veloxquant.ctl.profile_input import Asked
    from veloxquant.measure.measurement import Run
    from veloxquant.profiles import ModelProfile

SCHEMA = "veloxquant.profile/1"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One session: model, prompt, plan, and the methods in the order they ran."""

    schema: str = SCHEMA
    model_id: str
    architecture: str
    num_parameters: int | None
    max_position: int | None = None
    """Positions that the model was made for, where its config says so."""
    prompt: str
    decision: str | None
    """Of the plan, None where none was asked for."""
    planned: str | None
    """Label of what the plan chose."""
    found: Comparison
    records: tuple[str, ...] = ()
    """Ids of the records that were written."""

    @classmethod
    def of(cls, asked: Asked, found: Comparison, described: ModelProfile, *, records: tuple[str, ...]) -> Self:
        """Put together what was asked and what was found."""
        plan = asked.plan
        return cls(
            model_id=described.model_id,
            architecture=described.architecture,
            num_parameters=described.num_parameters,
            max_position=described.max_position,
            prompt=asked.text,
            decision=None if plan is None else plan.decision,
            planned=None if plan is None or plan.chosen is None else plan.chosen.label,
            found=found,
            records=records,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values: bytes as whole numbers, times in the unit their name ends in, ratios as fractions of 1."""
        without = msgspec.structs.replace(self, found=msgspec.structs.replace(self.found, runs=()))
        plain: dict[str, Any] = msgspec.to_builtins(without)
        measured = plain.pop("found")
        more = {
            "generated_tokens": self.found.generated_tokens,
            "fp16_cache_bytes": self.found.fp16_cache_bytes,
            "runs": [self._run(one) for one in self.found.runs],
        }
        return {**plain, **measured, **more}

    def _run(self, one: Run) -> dict[str, Any]:
        # Thousands of points a layer; the run's own curve is enough.
        layers = [dataclasses.replace(layer, timeline=()) for layer in one.report.layers]
        report = dataclasses.replace(one.report, layers=layers)
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(one, report=report))
        return {
            **plain,
            "memory_reduction": self.found.memory_reduction(one),
            "ratio_to_fp16_run": self.found.ratio_to_fp16_run(one),
            "ratio_to_true_fp16": one.resident_ratio,
            "agreeing_tokens": self.found.agreeing_tokens(one),
            "same_text_as_fp16": self.found.same_text(one),
        }

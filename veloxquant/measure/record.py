"""What a run says, as a record of the benchmark store, so that the next plan rests on it.

Lengths follow the planner's rule: `context_length` is the prompt, and `workload.generation_length` what was generated
after it, as many tokens for every method; the caches held both when their bytes were read. `memory_reduction` is the
ratio to the engine's own cache (method "fp16") of the same session, its keys and values counted at 16 bits a number.
Where the model computes in 32 that cache took twice as much, which a tag says, and its own record has a ratio of 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks.fingerprint import UNKNOWN
from veloxquant.benchmarks.storage import drop, reaching, write_aside
from veloxquant.profiles import ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
    from veloxquant.measure.comparison import Comparison
    from veloxquant.measure.measurement import Run
    from veloxquant.models.resolve import ModelSource

SOURCE = "profile"
"""`source` of the records that this room writes."""


def describe(source: ModelSource, model: Any) -> ModelProfile:
    """What a record tells of a loaded model: id, architecture, parameters; packed weights count as they were."""
    from mlx_lm.utils import get_total_parameters

    from veloxquant.models import fields as fields_of_config

    architecture = source.config.get("model_type")
    return ModelProfile(
        model_id=source.model_id,
        architecture=architecture if isinstance(architecture, str) else UNKNOWN,
        config_hash=source.config_hash,
        num_parameters=get_total_parameters(model),
        max_position=fields_of_config.whole(source.config, fields_of_config.MAX_POSITION),
    )


def make_ready(store: BenchmarkDatabase) -> None:
    """Make the store's folders, and put a file there and take it away: what cannot be written is told before a run.

    Raises StoreUnavailable.
    """
    store.save()  # with nothing to save: folders and lock
    with reaching(store.records_dir, "write to"):
        drop(write_aside(store.records_dir / "ready", b""))


def publish(store: BenchmarkDatabase, profile: ModelProfile, found: Comparison, one: Run) -> BenchmarkRecord:
    """Write the record of one run; it is on the disk when it comes out. Raises RecordInvalid, StoreUnavailable."""
    return store.add(one.label, profile.model_id, model=profile, **fields(found, one))


def fields(found: Comparison, one: Run) -> dict[str, Any]:
    """What `BenchmarkDatabase.add` takes besides method and model."""
    about = found.conditions
    return {
        "context_length": one.prompt_tokens,
        "memory_bytes": one.resident_bytes,
        "memory_reduction": found.memory_reduction(one),
        "throughput_tok_s": one.decode_tok_s or 0.0,
        "latency_ms_per_token": one.ms_per_token or 0.0,
        "chip": about.chip or UNKNOWN,
        "mlx_version": about.mlx_version or UNKNOWN,
        "macos_version": about.macos_version or UNKNOWN,
        "workload": WorkloadProfile(
            context_length=one.prompt_tokens,
            generation_length=one.generated_tokens,
            prefill_step_size=one.prefill_step_size,
        ),
        "source": SOURCE,
        "tags": tags(found, one),
    }


def tags(found: Comparison, one: Run) -> list[str]:
    """Tokens that were held, repeats of the timed run, engine, a baseline of 32 bits, and what may have slowed it."""
    about = found.conditions
    said = [f"tokens={one.prompt_tokens + one.generated_tokens}", "repeats=1"]
    if about.mlx_lm_version:
        said.append(f"mlx-lm={about.mlx_lm_version}")
    strained = ["battery"] * bool(about.on_battery) + ["low-power"] * bool(about.low_power_mode)
    return said + ["baseline=float32"] * found.is_wide + strained

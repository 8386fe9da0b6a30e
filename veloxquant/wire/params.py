"""What each call takes, as typed values; docs/protocol.md word for word.

Every struct refuses unknown fields by name. Sizes in bytes, lengths in tokens, times in milliseconds. Defaults are
left out when encoding, so that a newer client can speak to an older daemon as long as it uses no newer field.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CONFIG_DEPTH = 32
MAX_CONFIG_ITEMS = 20_000
MAX_RECORDS = 500

Size = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Topic = Literal["generation", "records", "methods", "hardware", "warnings"]
TOPICS: tuple[Topic, ...] = ("generation", "records", "methods", "hardware", "warnings")


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all params."""


class NoParams(Params, frozen=True, kw_only=True):
    """Calls that take nothing."""


class ModelParams(Params, frozen=True, kw_only=True):
    """Which model: exactly one of `path`, `id` and `config`; `model_id` and `weights_bytes` go with `config`."""

    path: Path | None = None
    id: Word | None = None
    config: dict[str, Any] | None = None
    model_id: Word | None = None
    weights_bytes: Annotated[int, Meta(ge=1, le=MAX_WHOLE)] | None = None

    def __post_init__(self) -> None:
        """Refuse none, or more than one, of the three ways to name a model."""
        given = [name for name in ("path", "id", "config") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidParams(
                f"model names {' and '.join(given) or 'nothing'}; it takes exactly one of path, id and config",
                hint='for example {"path": "/models/llama"} or {"id": "org/name"}',
                field="model",
            )
        if self.path is not None and "\0" in self.path:
            raise InvalidParams("model.path holds a NUL byte", hint="give a folder's path", field="model.path")
        for name in ("model_id", "weights_bytes"):
            if self.config is None and getattr(self, name) is not None:
                raise InvalidParams(
                    f"model.{name} goes with model.config only",
                    hint=f"leave {name} out: it is read from the model itself",
                    field=f"model.{name}",
                )
        if self.config is not None:
            _check_config(self.config)


class HardwareOverrides(Params, frozen=True, kw_only=True):
    """Facts to plan with instead of this machine's. Naming a chip means "as if on that chip"."""

    chip: Word | None = None
    gpu_cores: Annotated[int, Meta(ge=1, le=4096)] | None = None
    total_memory_bytes: Annotated[int, Meta(ge=1, le=MAX_WHOLE)] | None = None
    working_set_bytes: Annotated[int, Meta(ge=1, le=MAX_WHOLE)] | None = None
    active_bytes: Size | None = None
    max_buffer_bytes: Annotated[int, Meta(ge=1, le=MAX_WHOLE)] | None = None
    bandwidth_gbps: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    mlx_version: Word | None = None
    macos_version: Word | None = None

    def given(self) -> dict[str, Any]:
        """What was said, without what was left out or null."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class EngineParams(Params, frozen=True, kw_only=True):
    """Which engine runs the model; null version means the installed one."""

    name: Literal["mlx-lm"] = "mlx-lm"
    version: Word | None = None


class FitWorkload(Params, frozen=True, kw_only=True):
    """A workload whose context is the question: the other fields of WorkloadProfile, whose ranges hold.

    Written out like all params, since this file is read beside docs/protocol.md; a test compares the two.
    """

    generation_length: int = 512
    batch_size: int = 1
    num_concurrent_requests: int = 1
    objective: str = "balanced"
    max_latency_ms: float | None = None
    max_kl: float | None = None
    allow_eviction: bool = False
    prefill_step_size: int = 2048

    def __post_init__(self) -> None:
        """Refuse what no workload can be."""
        self.profile()

    def profile(self) -> WorkloadProfile:
        """The same as a WorkloadProfile, its context the shortest there is."""
        return WorkloadProfile(context_length=1, **{name: getattr(self, name) for name in self.__struct_fields__})


class _Question(Params, frozen=True, kw_only=True):
    """What `plan`, `fit` and `explain` share besides model and workload."""

    hardware: HardwareOverrides | None = None
    engine: EngineParams | None = None
    memory_budget_bytes: Size | None = None
    methods: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=256)] | None = None


class PlanParams(_Question, frozen=True, kw_only=True):
    """`plan`: one model, one workload, one machine."""

    model: ModelParams
    workload: WorkloadProfile = WorkloadProfile()

    @property
    def workload_profile(self) -> WorkloadProfile:
        """The workload asked for."""
        return self.workload


class FitParams(_Question, frozen=True, kw_only=True):
    """`fit`: as `plan`, without a context length."""

    model: ModelParams
    workload: FitWorkload = FitWorkload()

    @property
    def workload_profile(self) -> WorkloadProfile:
        """The workload asked for, at a context of one token."""
        return self.workload.profile()


class ExplainParams(_Question, frozen=True, kw_only=True):
    """`explain`: a remembered plan by its id, or the same params as `plan`; one variant of it, or the chosen one."""

    plan_id: Word | None = None
    label: Word | None = None
    model: ModelParams | None = None
    workload: WorkloadProfile | None = None

    def __post_init__(self) -> None:
        """Refuse neither and both."""
        if (self.plan_id is None) == (self.model is None):
            raise InvalidParams(
                "explain takes either plan_id or model",
                hint="give the plan_id of an answer, or the params of the plan",
                field="plan_id",
            )
        extra = [n for n in ("workload", *_Question.__struct_fields__) if getattr(self, n) is not None]
        if self.plan_id is not None and extra:
            raise InvalidParams(
                f"{extra[0]} does not go with plan_id",
                hint="a remembered plan has its own; leave it out",
                field=extra[0],
            )

    def plan_params(self) -> PlanParams:
        """The plan to make when no plan_id was given."""
        if self.model is None:
            raise InvalidParams("explain by plan_id makes no plan", hint="give model", field="model")
        shared = {name: getattr(self, name) for name in _Question.__struct_fields__}
        return PlanParams(model=self.model, workload=self.workload or WorkloadProfile(), **shared)


class HelloParams(Params, frozen=True, kw_only=True):
    """`hello`: who asks, which protocol versions it speaks, which capabilities it wants."""

    client: Word | None = None
    protocol: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=64)] = (1,)
    want: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()


class MethodsParams(Params, frozen=True, kw_only=True):
    """`methods`: all of them, or the one of this name."""

    name: Word | None = None


class RecordsParams(Params, frozen=True, kw_only=True):
    """`records`: a page of what the benchmark directory holds, newest first."""

    limit: Annotated[int, Meta(ge=1, le=MAX_RECORDS)] = 100
    offset: Annotated[int, Meta(ge=0, le=MAX_WHOLE)] = 0
    method: Word | None = None
    model_id: Word | None = None
    architecture: Word | None = None
    chip: Word | None = None
    mlx_version: Word | None = None
    source: Word | None = None
    tag: Word | None = None
    pinned: bool = False
    since: Word | None = None
    """A date or a time in ISO 8601, in UTC where it does not say: measured then or later."""
    skipped: bool = False
    """Also list what is in the directory and not used, with the reason."""

    def __post_init__(self) -> None:
        """Refuse a `since` that is no time."""
        self.since_s()

    def since_s(self) -> float | None:
        """`since` in seconds since 1970."""
        if self.since is None:
            return None
        try:
            at = datetime.fromisoformat(self.since)
            return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise InvalidParams(
                f"since is {quoted(self.since)}, which is no time",
                hint="write 2026-11-30 or 2026-11-30T08:00:00Z",
                field="since",
            ) from None


class HardwareParams(Params, frozen=True, kw_only=True):
    """`hardware`: this machine, or this machine with overrides."""

    hardware: HardwareOverrides | None = None


class SubscribeParams(Params, frozen=True, kw_only=True):
    """`subscribe`: which topics; all when left out."""

    topics: Annotated[tuple[Topic, ...], Meta(min_length=1, max_length=16)] = TOPICS


class UnsubscribeParams(Params, frozen=True, kw_only=True):
    """`unsubscribe`: which topics; all when left out."""

    topics: Annotated[tuple[Topic, ...], Meta(min_length=1, max_length=16)] = TOPICS


PARAMS: dict[str, type[Params]] = {
    "hello": HelloParams,
    "ping": NoParams,
    "plan": PlanParams,
    "fit": FitParams,
    "explain": ExplainParams,
    "methods": MethodsParams,
    "records": RecordsParams,
    "hardware": HardwareParams,
    "status": NoParams,
    "metrics": NoParams,
    "reload": NoParams,
    "subscribe": SubscribeParams,
    "unsubscribe": UnsubscribeParams,
    "shutdown": NoParams,
}
"""Every call of protocol 1 and what it takes."""


def _check_config(config: dict[str, Any]) -> None:
    """A config is an arbitrary object, but neither deep nor crowded, and its numbers can be written down again."""
    for count, (depth, value) in enumerate(_walk(config)):
        if depth > MAX_CONFIG_DEPTH or count > MAX_CONFIG_ITEMS:
            raise InvalidParams(
                f"model.config has more than {MAX_CONFIG_DEPTH} levels or more than {MAX_CONFIG_ITEMS} values",
                hint="send the model's config.json as it is published",
                field="model.config",
            )
        if not _writable(value):
            raise InvalidParams(
                "model.config holds a number that is not finite or has more than 64 bits",
                hint="send the model's config.json as it is published",
                field="model.config",
            )


def _writable(value: Any) -> bool:
    """Whether JSON can hold it and every reader gets it back."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return not isinstance(value, float) or math.isfinite(value)


def _walk(config: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Every value with its depth, without recursion."""
    stack: list[tuple[int, Any]] = [(0, config)]
    while stack:
        depth, value = stack.pop()
        yield depth, value
        if isinstance(value, dict):
            stack.extend((depth + 1, child) for child in value.values())
        elif isinstance(value, list):
            stack.extend((depth + 1, child) for child in value)

"""Hand-made models, machines, methods and records. Geometry is from the published configs named beside each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.errors import MethodRefused
from veloxquant.methods.method import Method, Parameter, QualityPrior, Variant
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.snapshot import Offer, QuarantinedMethod, Snapshot
from veloxquant.profiles import CacheLayer, CachePart, HardwareProfile, KeptLayer, ModelProfile, Probe, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.result import Candidate, Plan, Rejected

GIB = 2**30
KL = {8: 0.0004, 6: 0.006, 5: 0.02, 4: 0.12, 3: 0.6, 2: 3.0}


class Own(Method):
    """The engine's own caches."""

    name = "fp16"
    batchable = True
    fused_attention = True

    def variants(self) -> list[Variant]:
        """One."""
        return [Variant(method="fp16", label="fp16")]

    def engine_settings(self, variant: Variant) -> dict[str, Any]:
        """No flag."""
        return {}


class Packed(Method):
    """As mlx-lm's quantized cache counts: bits + scale and bias of the cache's item size for each group."""

    name = "affine"

    def __init__(self, bits: Any = (8, 4), groups: tuple[int, ...] = (32, 64, 128)) -> None:
        self._pairs = [(b, g) for b in bits for g in groups]

    def variants(self) -> list[Variant]:
        """Bits times groups."""
        return [
            Variant(method="affine", label=f"affine{b}-g{g}", params={"bits": b, "group": g}) for b, g in self._pairs
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Groups divide both widths."""
        group = variant.params["group"]
        if part.key_width % group or part.value_width % group:
            return "width_not_divisible", f"groups of {group} do not divide the width {part.key_width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Scale and bias included."""
        return variant.params["bits"] + 16 * part.key_itemsize / variant.params["group"]

    value_bits = key_bits

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Some monotone figure: half as much again for each doubling of the group, as from 32 to 64 on SmolLM2-135M."""
        kl = KL[variant.params["bits"]] * 1.5 ** math.log2(variant.params["group"] / 64)
        return QualityPrior(kl_mean=kl, low=kl / 2, high=kl * 2, source="test")

    def engine_settings(self, variant: Variant) -> dict[str, Any]:
        """mlx-lm's flags."""
        return {"kv_bits": variant.params["bits"], "kv_group_size": variant.params["group"]}


class Synthetic(Method):
    """One variant with the given bits, fixed bytes and divergence."""

    def __init__(
        self,
        name: str,
        bits: Any,
        kl: float,
        *,
        spread: float = 2.0,
        fixed: int = 0,
        batchable: bool = False,
        fused: bool = False,
        unpack: float = 0.0,
        workspace: int = 0,
        moved: float = 0.0,
    ) -> None:
        self.moved = moved
        self.workspace = workspace
        self.name, self.batchable, self.fused_attention = name, batchable, fused
        self._bits, self._kl, self._spread, self._fixed, self._unpack = bits, kl, spread, fixed, unpack

    def variants(self) -> list[Variant]:
        """One."""
        return [Variant(method=self.name, label=self.name)]

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Given."""
        return self._bits

    value_bits = key_bits

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """The given number for each query and slot."""
        return self.workspace * queries * slots

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Given."""
        return self._fixed

    def unpack_cost(self, variant: Variant) -> float:
        """Given."""
        return self._unpack

    def unpack_bytes(self, variant: Variant) -> float:
        """Given."""
        return self.moved

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Given."""
        return QualityPrior(kl_mean=self._kl, low=self._kl / self._spread, high=self._kl * self._spread, source="test")


class Counting(Synthetic):
    """Counts its own slots: whole steps of what is older than `lag` tokens, at most `bound` of them."""

    def __init__(
        self, name: str, bits: Any, kl: float, *, step: int, lag: int = 0, bound: Any = None, **more: Any
    ) -> None:
        super().__init__(name, bits, kl, **more)
        self._step, self._lag, self._bound = step, lag, bound

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int:
        """By length alone."""
        grown = -(-max(0, tokens - self._lag) // self._step) * self._step
        bound = variant.params.get("bound", self._bound)
        return grown if bound is None else min(grown, bound)


class PerLayer(Counting):
    """Bounded by a budget that halves from the first packed layer to the last; `needs` a calibration or not."""

    needs = False

    def parameters(self) -> list[Parameter]:
        """The bound."""
        return [Parameter(name="bound", kind="int", low=1)]

    def layer_params(self, variant: Variant, places: Any, calibration: Any) -> Any:
        """The first half of the layers get `bound` slots, the others half of them."""
        if self.needs and calibration is None:
            raise MethodRefused("this model was not calibrated", hint="run a calibration", field="calibration")
        return [{"bound": self._bound if 2 * p.order < p.count else self._bound // 2} for p in places]


@dataclass(frozen=True)
class GivenRecords:
    """Records with the scores they are given, by variant label."""

    scored: tuple[tuple[float, BenchmarkRecord], ...] = field(default_factory=tuple)

    def matches(
        self, label: str, model: Any, workload: Any, hardware: Any
    ) -> tuple[tuple[float, BenchmarkRecord], ...]:
        """Those of the label."""
        return tuple(pair for pair in self.scored if pair[1].method == label)

    def at_any_length(self, label: str, model: Any, hardware: Any) -> tuple[tuple[float, BenchmarkRecord], ...]:
        """Those of the label."""
        return self.matches(label, model, None, hardware)


def kv(heads: int, width: int, *, value: int | None = None, itemsize: int = 2, latent: bool = False) -> CachePart:
    """One plain growing cache part."""
    return CachePart(
        kind="kv",
        engine_class="KVCache",
        heads=heads,
        key_width=width,
        value_width=width if value is None else value,
        key_itemsize=itemsize,
        value_itemsize=itemsize,
        latent=latent,
    )


def window(heads: int, width: int, slots: int) -> CachePart:
    """One sliding window."""
    return CachePart(
        kind="window",
        engine_class="RotatingKVCache",
        heads=heads,
        key_width=width,
        value_width=width,
        key_itemsize=2,
        value_itemsize=2,
        window=slots,
    )


def state(size: int) -> CachePart:
    """One recurrent state."""
    return CachePart(kind="state", engine_class="ArraysCache", state_bytes=size)


def layers(*parts: CachePart) -> tuple[CacheLayer, ...]:
    """One layer for each part."""
    return tuple(CacheLayer(index=i, engine_class=p.engine_class, parts=(p,)) for i, p in enumerate(parts))


def model(parts: Sequence[CachePart], **fields: Any) -> ModelProfile:
    """A traced model with these layers."""
    made = {
        "model_id": "test/model",
        "architecture": "test",
        "source": "traced",
        "num_layers": len(parts),
        "layers": layers(*parts),
        "query_heads": 32,
        "head_width": 128,
        "num_parameters": 8_000_000_000,
        "active_parameters": 8_000_000_000,
        "weights_bytes": 4 * GIB,
        "read_bytes_per_token": 4 * GIB,
        "weight_bits": 4.5,
    }
    return ModelProfile(**(made | fields))


def llama_8b(**fields: Any) -> ModelProfile:
    """meta-llama/Llama-3.1-8B: 32 layers, 8 KV heads of 128, 32 query heads; 4-bit weights of 4.5 GiB."""
    own = {"model_id": "meta-llama/Llama-3.1-8B", "architecture": "llama"}
    own |= {"num_parameters": 8_030_261_248, "active_parameters": 8_030_261_248}
    return model([kv(8, 128)] * 32, **(own | {"weights_bytes": int(4.5 * GIB)} | fields))


def qwen25_7b(**fields: Any) -> ModelProfile:
    """Qwen/Qwen2.5-7B: 28 layers, 4 KV heads of 128, 28 query heads."""
    own = {"model_id": "Qwen/Qwen2.5-7B", "architecture": "qwen2", "num_parameters": 7_615_616_512, "query_heads": 28}
    return model([kv(4, 128)] * 28, **(own | fields))


def deepseek_v3(*, refused: str | None = None, **fields: Any) -> ModelProfile:
    """deepseek-ai/DeepSeek-V3: 61 layers, one latent head of 512 + 64; `refused` is what the trace saw."""
    own = {"model_id": "deepseek-ai/DeepSeek-V3", "architecture": "deepseek_v3", "query_heads": 128}
    own["weights_bytes"] = 350 * GIB
    if refused:
        labels = [v.label for v in Packed().variants()]
        own["probes"] = tuple(Probe(method="affine", label=label, refused=refused) for label in labels)
    return model([kv(1, 512, value=64, latent=True)] * 61, **(own | fields))


def qwen35_27b(state_bytes: int = 3_244_032, **fields: Any) -> ModelProfile:
    """Qwen/Qwen3.5-27B: 64 layers, every fourth with 4 KV heads of 256, the others recurrent."""
    parts = [kv(4, 256) if i % 4 == 3 else state(state_bytes) for i in range(64)]
    own = {"model_id": "Qwen/Qwen3.5-27B", "architecture": "qwen3_5", "query_heads": 24, "head_width": 256}
    return model(parts, **(own | fields))


def phi3_mini(**fields: Any) -> ModelProfile:
    """microsoft/Phi-3-mini-4k: 32 layers, 32 KV heads of 96."""
    return model([kv(32, 96)] * 32, **({"model_id": "microsoft/Phi-3-mini", "architecture": "phi3"} | fields))


def windowed(**fields: Any) -> ModelProfile:
    """Five sliding windows of 512 to one growing layer, 24 layers, as gemma-3 alternates."""
    parts = [kv(4, 256) if i % 6 == 5 else window(4, 256, 512) for i in range(24)]
    grown = tuple(i for i in range(24) if i % 6 == 5)
    kept = tuple(KeptLayer(index=i, reason="window") for i in range(24) if i % 6 != 5)
    labels = [v.label for v in Packed().variants()]
    probes = tuple(Probe(method="affine", label=label, packed=grown, kept=kept) for label in labels)
    return model(parts, **({"model_id": "test/windowed", "probes": probes} | fields))


def mac(memory_gib: float, working_set_gib: Any = None, **fields: Any) -> HardwareProfile:
    """A Mac with nothing else running; the working set is given, not guessed."""
    made = {
        "chip": "Apple M2",
        "backend": "metal",
        "total_memory_bytes": int(memory_gib * GIB),
        "working_set_bytes": int((working_set_gib or 0.75 * memory_gib) * GIB),
        "active_bytes": 0,
        "bandwidth_gbps": 100.0,
        "prefill_tflops": 2.7,
        "decode_efficiency": {"f16": 0.91, "q8": 0.87, "q4": 0.84},
        "mlx_version": "0.32.4",
        "macos_version": "26.1",
    }
    return HardwareProfile(**(made | fields))


def offers(*methods: Method) -> tuple[Offer, ...]:
    """Every variant of these methods."""
    return tuple(Offer(method, variant) for method in methods for variant in method.variants())


def snapshot(
    machine: HardwareProfile,
    *,
    on_offer: Sequence[Offer] | None = None,
    records: Any = (),
    quarantined: Any = (),
    **fields: Any,
) -> Snapshot:
    """What the planner knows; by default the engine's own caches and the packed ones."""
    return Snapshot(
        hardware=machine,
        offers=offers(Own(), Packed()) if on_offer is None else tuple(on_offer),
        records=GivenRecords(tuple(records)),
        quarantined=tuple(QuarantinedMethod(name, reason) for name, reason in quarantined),
        **fields,
    )


def ask(
    profile: ModelProfile,
    machine: HardwareProfile,
    *,
    on_offer: Sequence[Offer] | None = None,
    records: Any = (),
    quarantined: Any = (),
    budget: int | None = None,
    methods: Any = None,
    **workload: Any,
) -> Plan:
    """One plan; generation_length is 0 unless given, so that lengths are exact."""
    lengths = {"generation_length": 0} | workload
    request = PlanRequest(
        model=profile, workload=WorkloadProfile(**lengths), memory_budget_bytes=budget, methods=methods
    )
    return plan(request, snapshot(machine, on_offer=on_offer, records=records, quarantined=quarantined))


def record(label: str, **fields: Any) -> BenchmarkRecord:
    """One measurement of Llama-3.1-8B on the M2, 5 repeats, no figure unless given."""
    made = {
        "id": f"{label}-{fields.get('context_length', 8192)}",
        "method": label,
        "model_id": "meta-llama/Llama-3.1-8B",
        "architecture": "llama",
        "context_length": 8192,
        "chip": "Apple M2",
        "mlx_version": "0.32.4",
        "macos_version": "26.1",
        "created_at": "2026-11-01T00:00:00+00:00",
        "workload": WorkloadProfile(generation_length=0, context_length=fields.get("context_length", 8192)),
        "tags": ["repeats=5"],
    }
    return BenchmarkRecord(**(made | fields))


def every(answer: Plan) -> list[Candidate]:
    """All candidates of a plan, the chosen one first."""
    return [c for c in (answer.chosen, *answer.alternatives) if c is not None]


def candidate(answer: Plan, label: str) -> Candidate:
    """The candidate of this label."""
    return next(c for c in every(answer) if c.label == label)


def rejection(answer: Plan, label: str) -> Rejected:
    """The rejection of this label."""
    return next(r for r in answer.rejected if r.label == label)


def codes(notes: Any) -> list[str]:
    """Codes of warnings or suggestions."""
    return [note.code for note in notes]

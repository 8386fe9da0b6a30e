"""The arithmetic of a plan as sentences: bytes, fit, decode, quality, and how far to trust each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.errors import InvalidParams
from veloxquant.planner.evidence import cited
from veloxquant.units import format_count, format_size

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate, Evidence, MemoryTerm, Plan, Rejected

_TOPIC = 11
_X = "\N{MULTIPLICATION SIGN}"
_HIGH, _MEDIUM = 0.8, 0.5

_DECISIONS = {
    "keep_fp16": "the engine's own cache is enough",
    "quantize": "a packed cache is the best that fits",
    "nothing_to_quantize": "no variant can pack a layer of this model; the engine's own cache fits",
    "no_fit": "no variant fits",
    "weights_do_not_fit": "the weights alone do not fit",
}


def explain(plan: Plan, label: str | None = None) -> tuple[str, ...]:
    """Sentences about one variant of a plan, by default about its decision and the chosen one.

    Raises InvalidParams (field "label") when the plan has no such variant.
    """
    if label is None:
        return _decision(plan) if plan.chosen is None else (*_decision(plan), *_candidate(plan, plan.chosen))
    candidates = (*filter(None, (plan.chosen,)), *plan.alternatives)
    for candidate in candidates:
        if candidate.label == label:
            return _candidate(plan, candidate)
    refused = [one for one in plan.rejected if one.label == label]
    if refused:
        return tuple(_rejected(one) for one in refused)
    known = sorted({c.label for c in candidates} | {r.label for r in plan.rejected})
    raise InvalidParams(
        f"the plan has no variant {label!r}", hint=f"it has {', '.join(known) or 'none'}", field="label"
    )


def _decision(plan: Plan) -> tuple[str, ...]:
    chosen = f": {plan.chosen.label}" if plan.chosen is not None else ""
    lines = [_line("decision", f"{plan.decision}{chosen} ({_DECISIONS[plan.decision]})")]
    lines += [_line("warning", note.text) for note in plan.warnings]
    lines += [_line("instead", note.text) for note in plan.suggestions]
    if plan.chosen is None:
        lines += [_rejected(one) for one in plan.rejected]
    return tuple(lines)


def _rejected(one: Rejected) -> str:
    short = f", short by {format_size(one.short_by_bytes)}" if one.short_by_bytes is not None else ""
    return _line("out", f"{one.label}: {one.reason}{short}: {one.detail}")


def _candidate(plan: Plan, one: Candidate) -> tuple[str, ...]:
    return tuple(
        line
        for part in (
            _layers(one),
            _bytes(plan, one),
            _held(plan, one),
            _fit(plan, one),
            _speed(plan, one),
            _quality(one),
        )
        for line in part
    )


def _layers(one: Candidate) -> list[str]:
    layers = one.layers
    text = f"{layers.packed} of {layers.total} packed, {layers.kept} as the engine has them"
    return [_line("layers", text), *(_line("", reason) for reason in layers.reasons.values())]


def _bytes(plan: Plan, one: Candidate) -> list[str]:
    memory = one.memory
    sequences = plan.workload["batch_size"] * plan.workload["num_concurrent_requests"]
    lines = [_line("bytes" if i == 0 else "", _term(term)) for i, term in enumerate(memory.terms)]
    total = f"{format_size(memory.stored_bytes)} stored for {format_count(sequences, 'sequence')}"
    if memory.evidence.source == "measured":
        total += f" by {cited(memory.evidence)}; the record wins over the arithmetic"
    lines.append(_line("", f"{total}, {memory.ratio:.3g} of the engine's own {format_size(memory.fp16_bytes)}"))
    growth = f"{memory.bytes_per_token:,.0f} bytes more with each token of a sequence"
    lines.append(_line("", f"{growth}, {format_size(memory.fixed_bytes)} that do not grow"))
    extra = memory.peak_bytes - memory.stored_bytes
    step = one.cache_config["prefill_step_size"]
    peak = f"{format_size(memory.peak_bytes)} at the peak: {format_size(extra)} more at the worst moment"
    lines.append(_line("", f"{peak}, with a prefill step of {step}"))
    return [*lines, *_grounds(memory.evidence)]


def _held(plan: Plan, one: Candidate) -> list[str]:
    if one.tokens_held is None:
        return []
    tokens = plan.workload["context_length"] + plan.workload["generation_length"]
    return [_line("drops", f"a layer holds at most {one.tokens_held:,} of {tokens:,} tokens; the others are gone")]


def _term(term: MemoryTerm) -> str:
    layers = format_count(term.layers, "layer")
    own = "".join(f", {name} {value}" for name, value in term.params.items())
    if term.kind == "state":
        return f"{layers} {_X} {format_size(term.fixed_bytes)} of state = {format_size(term.bytes)}"
    if term.key_width == term.value_width and term.key_bits == term.value_bits:
        numbers = f"{term.key_width} {_X} 2 (K, V) {_X} {term.key_bits:g} bits"
    else:
        keys, values = f"{term.key_width} {_X} {term.key_bits:g}", f"{term.value_width} {_X} {term.value_bits:g}"
        numbers = f"({keys} (K) + {values} (V)) bits"
    fixed = f" + {layers} {_X} {format_size(term.fixed_bytes)} fixed" if term.fixed_bytes else ""
    what = f"packed{own}" if term.packed else term.kind
    one_layer = f"{format_count(term.heads, 'head')} {_X} {numbers} {_X} {term.slots:,} slots / 8"
    return f"{layers} {_X} {one_layer}{fixed} = {format_size(term.bytes)} ({what})"


def _fit(plan: Plan, one: Candidate) -> list[str]:
    budget, fit = plan.budget, one.fit
    parts = (
        f"{format_size(budget.weights_bytes or 0)} weights + {format_size(one.memory.peak_bytes)} caches at the peak + "
        f"{format_size(budget.active_bytes)} other work + {format_size(budget.reserve_bytes)} reserve"
    )
    room = f"{format_size(budget.kv_budget_bytes or 0)} for caches, {format_size(fit.headroom_bytes)} to spare"
    return [
        _line("fit", f"{parts} = {format_size(fit.total_bytes)}; {room}"),
        _line("", f"largest context at the asked slots: {fit.max_context_tokens:,} tokens"),
    ]


def _speed(plan: Plan, one: Candidate) -> list[str]:
    speed = one.speed
    tokens = plan.workload["context_length"] + plan.workload["generation_length"]
    if speed.latency_ms_per_token is None or speed.low is None or speed.high is None or speed.decode_tok_s is None:
        lines = [_line("decode", "unknown")]
    else:
        text = (
            f"{speed.latency_ms_per_token:.3g} ms a token at {tokens:,} tokens ({speed.low:.3g} to {speed.high:.3g}), "
            f"{speed.decode_tok_s:.3g} tokens a second over all sequences"
        )
        lines = [_line("decode", text)]
    if speed.prefill_tok_s is not None:
        lines.append(_line("prefill", f"{speed.prefill_tok_s:,.0f} tokens a second"))
    return [*lines, *_grounds(speed.evidence)]


def _quality(one: Candidate) -> list[str]:
    quality = one.quality
    text = (
        f"{quality.kl_mean:.3g} nats a token against the engine's own cache ({quality.low:.3g} to {quality.high:.3g})"
    )
    if quality.perplexity_delta is not None:
        text += f", perplexity {quality.perplexity_delta:+.3g}"
    return [_line("quality", text), *_grounds(quality.evidence)]


def _grounds(evidence: Evidence) -> list[str]:
    trust = "high" if evidence.confidence >= _HIGH else "medium" if evidence.confidence >= _MEDIUM else "low"
    by = f" by {cited(evidence)}" if evidence.record_ids else ""
    head = f"{evidence.source}{by}, confidence {trust} ({evidence.confidence:.2f})"
    return [_line("", head), *(_line("", note) for note in evidence.notes)]


def _line(topic: str, text: str) -> str:
    return f"{topic:<{_TOPIC}}{text}"

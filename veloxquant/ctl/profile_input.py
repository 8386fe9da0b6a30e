"""What `profile` is to run: the prompt, the model's files, the methods. All of it is checked without the weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant.errors import InvalidParams, MethodNotFound

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from veloxquant.ctl.session import Session
    from veloxquant.measure.measurement import Subject
    from veloxquant.methods import Variant
    from veloxquant.methods.registry import Loaded
    from veloxquant.models.resolve import ModelSource
    from veloxquant.planner.result import Plan
    from veloxquant.profiles import Calibration

_MAX_PROMPT_BYTES = 64 * 2**20
"""2**24 tokens of four bytes: the longest context that any model states."""


@dataclass(frozen=True)
class Asked:
    """One call of `profile`, with everything but the model's weights at hand."""

    source: ModelSource
    tokenizer: Any
    text: str
    prompt: list[int]
    max_tokens: int
    prefill_step_size: int
    variants: tuple[Variant, ...]
    """The engine's own first."""
    plan: Plan | None
    loaded: Loaded
    calibrations: Mapping[tuple[str, str], Calibration]
    """Those of the benchmark directory, for methods that choose by them."""


def read(session: Session) -> Asked:
    """Read and check what the flags say, ask the planner where that is wanted.

    Raises InvalidParams, ModelNotFound, ModelConfigInvalid, MethodNotFound, EngineUnavailable.
    """
    from veloxquant.local import read_calibrations
    from veloxquant.measure import loading
    from veloxquant.measure.measurement import PREFILL_STEP
    from veloxquant.methods import registry
    from veloxquant.profiles import WorkloadProfile

    options = session.options
    text = _text(options)
    if options.max_tokens < 1:
        raise InvalidParams(
            "--max-tokens is 0: nothing would be generated", hint="give 1 or more", field="--max-tokens"
        )
    found = source(options.model)
    loaded = registry.load()
    variants = _variants(options.method, loaded, session.config.methods.disabled)
    tokenizer = loading.load_tokenizer(found)
    prompt = loading.encode(tokenizer, text, chat=not options.ignore_chat_template)
    step = PREFILL_STEP if options.prefill_step is None else options.prefill_step
    WorkloadProfile(context_length=len(prompt), generation_length=options.max_tokens, prefill_step_size=step)
    plan = _plan(session, len(prompt)) if options.plan or not options.method else None
    return Asked(
        found,
        tokenizer,
        text,
        prompt,
        options.max_tokens,
        step,
        variants,
        plan,
        loaded,
        read_calibrations(session.config),
    )


def subjects(asked: Asked, model: Any) -> list[Subject]:
    """The engine's own cache, the methods asked for, and the plan's choice where it is not among them."""
    from veloxquant.measure.measurement import Subject
    from veloxquant.serve.builder import KVCacheBuilder, KVCacheConfig

    chosen = None if asked.plan is None else asked.plan.chosen
    found = asked.source
    calibration = asked.calibrations.get((found.model_id, found.config_hash))

    def subject(variant: Variant) -> Subject:
        config = KVCacheConfig.of(variant)
        return Subject(
            label=variant.label,
            method=variant.method,
            params=dict(variant.params),
            build=lambda: KVCacheBuilder.for_model(model, config, methods=asked.loaded, calibration=calibration),
            prefill_step_size=asked.prefill_step_size,
            planned=chosen is not None and chosen.label == variant.label,
        )

    made = [subject(variant) for variant in asked.variants]
    if asked.plan is not None and chosen is not None and not any(one.planned for one in made):
        plan = asked.plan
        made.append(
            Subject(
                label=chosen.label,
                method=chosen.method,
                params=dict(chosen.params),
                build=lambda: KVCacheBuilder.for_model(model, plan, methods=asked.loaded),
                prefill_step_size=int(chosen.cache_config["prefill_step_size"]),
                planned=True,
            )
        )
    return made


def _text(options: argparse.Namespace) -> str:
    if (options.prompt is None) == (options.prompt_file is None):
        given = "both" if options.prompt is not None else "neither"
        raise InvalidParams(
            f"a prompt is given by one of --prompt and --prompt-file, and {given} was given",
            hint="--prompt 'What is the capital of France?', --prompt-file FILE, or --prompt-file - for standard input",
            field="--prompt",
        )
    text = options.prompt if options.prompt is not None else file_text(options.prompt_file, "--prompt-file")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParams(
            "--prompt is not valid text in UTF-8", hint="put it into a file", field="--prompt"
        ) from None
    if not text.strip():
        raise InvalidParams("the prompt is empty", hint="give some text", field="--prompt")
    return str(text)


def file_text(named: str, field: str, most_bytes: int = _MAX_PROMPT_BYTES) -> str:
    """A text file, or standard input for "-". Raises InvalidParams that names the flag."""
    hint = "give a text file in UTF-8, or - for standard input"
    try:
        if named == "-":
            data = sys.stdin.buffer.read(most_bytes + 1)
        else:
            with Path(named).open("rb") as file:
                data = file.read(most_bytes + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{named} is not text in UTF-8: {error.reason}", hint=hint, field=field) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise InvalidParams(f"{named} cannot be read: {why}", hint=hint, field=field) from None
    if len(data) > most_bytes:
        why = f"{named} is larger than {most_bytes >> 20} MiB: no model reads that much"
        raise InvalidParams(why, hint=hint, field=field)
    return text


def source(named: str) -> ModelSource:
    """A folder, or an id of the local hub cache, by the rule that plans follow."""
    from veloxquant._question import model_params
    from veloxquant.models.resolve import resolve

    params = model_params(named)
    return resolve(path=params.get("path"), model_id=params.get("id"))


def _variants(names: list[str], loaded: Loaded, disabled: tuple[str, ...]) -> tuple[Variant, ...]:
    """Each name's variant once, the engine's own before them."""
    from veloxquant.profiles.model import ENGINE_OWN

    found = {}
    for name in [ENGINE_OWN, *names]:
        variant = _variant(name, loaded, disabled)
        found[variant.label] = variant
    return tuple(found.values())


def _variant(name: str, loaded: Loaded, disabled: tuple[str, ...]) -> Variant:
    """The variant of a label, or a method's own with its defaults. Raises MethodNotFound, InvalidParams."""
    from veloxquant.methods.parameters import variant_for
    from veloxquant.profiles.model import ENGINE_OWN
    from veloxquant.views import no_such_method

    labels = {variant.label: variant for method, variant in loaded.variants if _usable(method.name, disabled)}
    names = {method.name for method in loaded.methods if _usable(method.name, disabled)}
    if name in labels:
        return labels[name]
    if name in names:
        return variant_for(loaded.method(name), {})
    if name in disabled:
        raise MethodNotFound(
            f"method {name} is disabled in the configuration", hint="take it out of methods.disabled", field="--method"
        )
    if name == ENGINE_OWN or name in {one.name for one in loaded.quarantined}:
        loaded.method(name)  # says why it is not ready
    raise no_such_method(name, sorted(names | set(labels)), field="--method")


def _usable(method: str, disabled: tuple[str, ...]) -> bool:
    """Whether the configuration lets this method run; the engine's own always does."""
    from veloxquant.profiles.model import ENGINE_OWN

    return method == ENGINE_OWN or method not in disabled


def _plan(session: Session, prompt_tokens: int) -> Plan:
    """What the planner chooses for this prompt, before our weights take any memory."""
    options = session.options
    step = {} if options.prefill_step is None else {"prefill_step_size": options.prefill_step}
    plan = session.client.plan(
        options.model, context_length=prompt_tokens, generation_length=options.max_tokens, **step
    )
    session.say_where()
    if plan.chosen is None:
        session.terminal.note(f"the plan chooses nothing: {plan.decision}")
    return plan

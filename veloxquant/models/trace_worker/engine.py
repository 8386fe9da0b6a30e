"""The engine itself: its model class built from a config, called on a few tokens, nothing evaluated."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from veloxquant.models.exchange import TRACE_RUNS, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_MODEL_TYPE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_LONGEST_TEXT = 400

_T = TypeVar("_T")


class EngineRefused(Exception):
    """The engine does not take the model. `kind`, message and `hint` go to the user."""

    def __init__(self, kind: FailureKind, message: str, hint: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.hint = hint


def build(config: Mapping[str, Any], dtype: str) -> Any:
    """A full-size mlx-lm model with lazy weights of `dtype`; takes a few MiB whatever the model's size.

    Raises EngineRefused for whatever the engine raises, a model module that ends the process included.
    """
    config = _untagged(config)
    if config.get("model_file") is not None:
        raise EngineRefused(
            "not_supported",
            f"the config asks to run a Python file of its own ({config['model_file']!r}), which is never done",
            "use a model whose architecture mlx-lm has",
        )
    model_class, args_class = _classes(config)
    try:
        model = model_class(args_class.from_dict(config))
        model.set_dtype(getattr(mx, dtype))
    except BaseException as error:
        raise _refused(error, config) from error
    return model


def fresh_caches(model: Any) -> list[Any]:
    """The engine's own cache list for one sequence (make_prompt_cache asks the model, never the config)."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def call(model: Any, caches: list[Any], runs: Iterable[tuple[int, int]]) -> None:
    """Call the model on zeros as (tokens, calls) says; leaves lazy arrays in the caches."""
    for tokens, calls in runs:
        for _ in range(calls):
            model(mx.zeros((1, tokens), mx.int32), cache=caches)


def traced_caches(model: Any, config: Mapping[str, Any], look: Callable[[list[Any]], _T]) -> tuple[list[Any], _T]:
    """The engine's own caches after the calls of a trace, and what `look` saw in them after the prefill call.

    Raises EngineRefused for whatever the engine raises.
    """
    try:
        caches = fresh_caches(model)
        call(model, caches, TRACE_RUNS[:1])
        seen = look(caches)
        call(model, caches, TRACE_RUNS[1:])
    except BaseException as error:
        raise _refused(error, config) from error
    return caches, seen


def sentence(error: BaseException) -> str:
    """An exception as one bounded line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_TEXT] if text else type(error).__name__


def _untagged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Undo the engine's tags for infinities ({"__float__": "Infinity"}), as its own load_config does."""
    from mlx_lm import utils

    decode = getattr(utils, "_decode_tagged_floats", dict)
    return dict(decode(dict(config)))


def _classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    from mlx_lm.utils import _get_classes

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise EngineRefused(
            "config_invalid", "the config has no model_type", "add the model_type the model was made with"
        )
    if not _MODEL_TYPE.fullmatch(model_type):
        raise EngineRefused(
            "not_supported",
            f"model_type {model_type[:64]!r} is no name mlx-lm could know",
            "give the model_type of the checkpoint's own config.json, such as llama",
        )
    try:
        model_class, args_class = _get_classes(dict(config))
    except AttributeError as error:
        raise _unknown(model_type) from error
    except ValueError as error:
        raise _unknown(model_type, error.__cause__) from error
    except BaseException as error:
        raise EngineRefused(
            "not_supported",
            f"mlx-lm's module for model_type {model_type!r} cannot be imported: {sentence(error)}",
            "install the package it needs, or choose another model",
        ) from error
    return model_class, args_class


def _unknown(model_type: str, cause: BaseException | None = None) -> EngineRefused:
    if isinstance(cause, ImportError) and cause.name is not None and not cause.name.startswith("mlx_lm.models."):
        return EngineRefused(
            "not_supported",
            f"mlx-lm's module for model_type {model_type!r} needs the package {cause.name!r}, which is not installed",
            f"install {cause.name}",
        )
    close = [name for name in difflib.get_close_matches(model_type, _known_types(), n=5) if _has_model(name)][:3]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return EngineRefused(
        "not_supported",
        f"the installed mlx-lm has no model_type {model_type!r}",
        f"{hint}a newer mlx-lm may have it: pip install --upgrade mlx-lm",
    )


def _known_types() -> list[str]:
    utils = importlib.import_module("mlx_lm.utils")
    package = importlib.import_module("mlx_lm.models")
    return [*getattr(utils, "MODEL_REMAPPING", {}), *(module.name for module in pkgutil.iter_modules(package.__path__))]


def _has_model(model_type: str) -> bool:
    """Whether the engine makes a model of that type: its folder of models holds caches and layers, too."""
    from mlx_lm.utils import _get_classes

    try:
        _get_classes({"model_type": model_type})
    except Exception:  # noqa: BLE001 -- a module that cannot be imported here is no help, whatever is wrong with it
        return False
    return True


def _refused(error: BaseException, config: Mapping[str, Any]) -> EngineRefused:
    model_type = config.get("model_type")
    text = str(error)
    if isinstance(error, TypeError) and (missing := _MISSING.search(text)):
        return EngineRefused(
            "config_invalid",
            f"the config of model_type {model_type!r} lacks fields that mlx-lm needs: {missing[1]}",
            "give the complete config.json of the checkpoint",
        )
    if isinstance(error, MemoryError):
        return EngineRefused(
            "config_invalid",
            "the model described by the config does not fit the trace's memory limit",
            "give the config.json of the checkpoint, or raise trace.memory_limit_bytes",
        )
    if "No Metal back-end" in text:
        return EngineRefused(
            "not_supported",
            f"mlx-lm runs model_type {model_type!r} on a Metal GPU only, and this machine has none: {sentence(error)}",
            "ask on the Mac that will run it",
        )
    return EngineRefused(
        "config_invalid",
        f"mlx-lm refuses the config of model_type {model_type!r}: {sentence(error)}",
        "give the complete config.json of the checkpoint",
    )

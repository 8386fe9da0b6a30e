"""A model and its tokenizer from a local folder, and a prompt as token ids. Never the network, never foreign code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant.errors import EngineUnavailable, InvalidParams, ModelConfigInvalid, ModelNotSupported

if TYPE_CHECKING:
    from veloxquant.models.resolve import ModelSource

_HINT = "give a folder that mlx_lm.load reads: config.json, *.safetensors, tokenizer.json"


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of a resolved model as mlx-lm wraps it. Raises ModelConfigInvalid, EngineUnavailable."""
    folder = _folder(source)
    utils = _engine()
    try:
        # False, not absent: else the tokenizer library asks on the terminal whether to run a model's own code.
        own = {"trust_remote_code": False}
        return utils.load_tokenizer(folder, own, eos_token_ids=source.config.get("eos_token_id"))
    except Exception as error:  # the tokenizer libraries raise anything for a broken file
        message = f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
        raise ModelConfigInvalid(message, hint=_HINT, field="model") from error


def load_model(source: ModelSource) -> Any:
    """The model with its weights in memory.

    Raises ModelConfigInvalid for files that cannot be read, ModelNotSupported for an architecture that mlx-lm lacks,
    EngineUnavailable without mlx-lm.
    """
    folder = _folder(source)
    utils = _engine()
    try:
        model, _ = utils.load_model(folder)
    except FileNotFoundError as error:
        message = f"{folder} holds a model that cannot be run: {error}"
        raise ModelConfigInvalid(message, hint=_HINT, field="model") from error
    except (Exception, SystemExit) as error:  # mlx-lm and its model modules raise anything; one ends the process
        message = f"the model in {folder} cannot be loaded: {type(error).__name__}: {error}"
        raise ModelNotSupported(message, hint=_HINT, field="model") from error
    return model


def encode(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt: as one message of a user where `chat` and the tokenizer has a template, else as it is.

    The same rule as mlx_lm.generate. Raises InvalidParams for a text that has no tokens.
    """
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        message = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        starts = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        found = tokenizer.encode(text, add_special_tokens=not starts)
    ids = [int(token) for token in found]
    if not ids:
        raise InvalidParams("the prompt has no tokens", hint="give some text", field="prompt")
    return ids


def _folder(source: ModelSource) -> Path:
    if source.path is None:
        raise InvalidParams(
            "a config alone cannot be run: it has no weights", hint="give the model's folder", field="model"
        )
    return Path(source.path)


def _engine() -> Any:
    """mlx_lm.utils, told to stay off the network before the hub's library reads its settings."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise EngineUnavailable(f"mlx-lm cannot be imported: {error}", hint="pip install mlx-lm") from error
    return utils

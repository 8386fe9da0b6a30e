"""Finding a model: a folder, an id in the local hub cache, or an inline config. Never the network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant import plain_file
from veloxquant.errors import MAX_WHOLE, InvalidParams, ModelConfigInvalid, ModelNotFound, quoted
from veloxquant.models import fields, own_code, weights
from veloxquant.models.weights import WeightFacts, is_file

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CONFIG_BYTES = 8 * 2**20
MAX_DEPTH = 64
MAX_VALUES = 2**18
_MAX_LABEL = 256
_MAX_REVISION_BYTES = 128
_ASSUMED_DTYPE = "bfloat16"

_ID = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?(?:/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?)?"
)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was found. `config` is what config.json says; treat it as a value."""

    model_id: str
    config: dict[str, Any]
    config_hash: str
    """SHA-256 of the config with sorted keys, hexadecimal."""
    weights: WeightFacts | None = None
    path: str | None = None


def resolve(
    *,
    path: str | None = None,
    model_id: str | None = None,
    config: Mapping[str, Any] | None = None,
    config_model_id: str | None = None,
    weights_bytes: int | None = None,
) -> ModelSource:
    """Find the model that exactly one of path, model_id and config names; weights_bytes overrides what files say.

    Raises InvalidParams, ModelNotFound, ModelConfigInvalid or, for one that asks to run code of its own,
    ModelNotSupported; `field` is "model", "model.path", "model.id",
    "model.config" or "model.weights_bytes".
    """
    if sum(given is not None for given in (path, model_id, config)) != 1:
        raise InvalidParams(
            "a model is named by exactly one of path, id and config", hint="give one of the three", field="model"
        )
    if config is not None:
        source = _inline(config, config_model_id)
    elif path is not None:
        source = _folder(_checked_folder(path), path, "model.path")
    else:
        assert model_id is not None  # noqa: S101 -- one of the three is given
        source = _cached(model_id)
    own_code.refuse(source.config, "model.config")
    return source if weights_bytes is None else _with_weights(source, weights_bytes)


def hub_cache(env: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps downloads: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return _home_expanded(env[variable])
    if env.get("HF_HOME"):
        return _home_expanded(env["HF_HOME"]) / "hub"
    caches = env.get("XDG_CACHE_HOME") or str(_home_expanded(env.get("HOME") or "~") / ".cache")
    return Path(caches) / "huggingface" / "hub"


def _home_expanded(name: str) -> Path:
    """The path with a leading ~ replaced, as it stands where there is no such home."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- Path.expanduser raises for an unknown user


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the config written with sorted keys and no blanks, hexadecimal."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def compute_dtype(source: ModelSource) -> tuple[str, tuple[str, ...]]:
    """What the model computes in, and its K and V are kept in; with a note where that had to be assumed.

    The weight files decide (mlx-lm loads them as they are), then the config.
    """
    known = source.weights.dtype if source.weights is not None else None
    stated = known or fields.stated_dtype(source.config)
    if stated is not None:
        return stated, ()
    return _ASSUMED_DTYPE, (f"neither weights nor config state a number format; {_ASSUMED_DTYPE} is assumed",)


def _inline(config: Mapping[str, Any], label: str | None) -> ModelSource:
    config = dict(config)
    _check(config, "model.config", "the inline config")
    if label is not None and not (0 < len(label) <= _MAX_LABEL and label.isprintable()):
        raise InvalidParams(
            f"model_id must be 1 to {_MAX_LABEL} printable characters", hint="shorten it", field="model.model_id"
        )
    digest = config_hash(config)
    return ModelSource(model_id=label or f"config:{digest[:12]}", config=config, config_hash=digest)


def _checked_folder(path: str) -> Path:
    try:
        folder = Path(path).expanduser()
        mode = folder.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(
            f"no model folder {path!r}: {getattr(error, 'strerror', None) or error}",
            hint="give the folder that holds config.json",
            field="model.path",
        ) from error
    if not stat.S_ISDIR(mode):
        raise InvalidParams(
            f"{path!r} is not a folder",
            hint="give the folder that holds config.json, or the contents of a config file as `config`",
            field="model.path",
        )
    return folder


def _cached(model_id: str) -> ModelSource:
    if not _ID.fullmatch(model_id) or ".." in model_id or "--" in model_id:
        raise InvalidParams(
            f"{model_id[:_MAX_LABEL]!r} is not a model id", hint="ids look like organisation/name", field="model.id"
        )
    home = hub_cache() / f"models--{model_id.replace('/', '--')}"
    snapshot = _snapshot(home)
    if snapshot is None:
        raise ModelNotFound(
            f"{model_id} is not in the local hub cache {home.parent}",
            hint="download it first (veloxquant never uses the network), or give a folder or a config",
            field="model.id",
        )
    return _folder(snapshot, model_id, "model.id")


def _snapshot(home: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one with a config."""
    revision = _revision(home / "refs" / "main")
    named = home / "snapshots" / revision
    if _REVISION.fullmatch(revision) and is_file(named / "config.json"):
        return named
    try:
        found = [path for path in (home / "snapshots").glob("*/config.json") if is_file(path)]
    except OSError:  # a path longer than the system takes
        return None
    return max(found, key=lambda path: (_changed_ns(path), path.parent.name)).parent if found else None


def _revision(reference: Path) -> str:
    """What a reference file says; "" for none, for one that is no short text, and for what a read could wait on."""
    try:
        return plain_file.read(reference, _MAX_REVISION_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return ""


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it went away while we looked
        return 0


def _folder(folder: Path, name: str, field: str) -> ModelSource:
    config = _read(folder / "config.json", field)
    label = name if field == "model.id" else folder.resolve().name
    return ModelSource(
        model_id=label.encode(errors="replace").decode(),  # names need not be text on every file system
        config=config,
        config_hash=config_hash(config),
        weights=weights.read(folder),
        path=str(folder.resolve()),
    )


def _read(path: Path, field: str) -> dict[str, Any]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _invalid(field, f"{path} is not a regular file")
        if status.st_size > MAX_CONFIG_BYTES:
            raise _invalid(field, f"{path} has {status.st_size} bytes; no config is longer than {MAX_CONFIG_BYTES}")
        text = plain_file.read(path, MAX_CONFIG_BYTES)
        # Counted first: 8 MiB of "[]," would be 300 MB, and a second in which no other thread runs.
        if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise _invalid(field, f"{path} holds more than {MAX_VALUES} values")
        config = json.loads(text)
    except FileNotFoundError as error:
        raise _invalid(field, f"{path.parent} has no config.json") from error
    except OSError as error:
        raise _invalid(field, f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON, bad UTF-8 and endless digits
        raise _invalid(field, f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _invalid(field, f"{path} holds a JSON {type(config).__name__}, not an object")
    _check(config, field, str(path))
    return config


def _check(config: dict[str, Any], field: str, where: str) -> None:
    """Refuse what JSON could not hold, what is nested too deep, and NaN (infinities occur in published configs)."""
    pending: list[tuple[Any, int]] = [(config, 0)]
    seen = 0
    while pending:
        value, depth = pending.pop()
        seen += 1
        if seen > MAX_VALUES:  # a Python caller's value may hold one list many times over
            raise _invalid(field, f"{where} holds more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _invalid(field, f"{where} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise _invalid(field, f"{where} has a key that is no string")
            pending.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend((inner, depth + 1) for inner in value)
        elif isinstance(value, float) and value != value:  # noqa: PLR0124 -- the test for NaN
            raise _invalid(field, f"{where} holds NaN")
        elif not isinstance(value, (str, int, float, bool, type(None))):
            raise _invalid(field, f"{where} holds a {type(value).__name__}, which JSON cannot")


def _with_weights(source: ModelSource, weights_bytes: int) -> ModelSource:
    whole = isinstance(weights_bytes, int) and not isinstance(weights_bytes, bool)
    if not whole or not 0 <= weights_bytes <= MAX_WHOLE:
        raise InvalidParams(
            f"weights_bytes is {quoted(weights_bytes)}, which is not a whole number from 0 to {MAX_WHOLE}",
            hint="give the bytes of all weights",
            field="model.weights_bytes",
        )
    known = source.weights or WeightFacts()
    given = msgspec.structs.replace(known, weights_bytes=weights_bytes, source="given")
    return msgspec.structs.replace(source, weights=given)


def _invalid(field: str, message: str) -> ModelConfigInvalid:
    return ModelConfigInvalid(message, hint="give a folder or config as published for mlx-lm", field=field)

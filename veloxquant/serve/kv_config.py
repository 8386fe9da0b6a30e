"""One method with its parameters, as a value that goes into files: what `KVCacheBuilder.for_model` builds from.

In TOML:

    method = "affine"
    head_dim = 64            # may be left out; layers, layer_count too
    [params]
    bits = 4
    group = 32
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant import bounded_toml
from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted
from veloxquant.methods.checks import NAME
from veloxquant.profiles.model import ENGINE_OWN
from veloxquant.serve import cache_config

if TYPE_CHECKING:
    from veloxquant.methods import Param, Variant
    from veloxquant.planner.result import Plan

MAX_WIDTH = 2**16
"""Hundred times the widest head that is published (576): more is a mistake."""
_MAX_FILE_BYTES = 2**20


class Params(Mapping[str, "Param"]):
    """Parameters by name, in the order of their names. Equal to any mapping with the same items; cannot change."""

    def __init__(self, given: Mapping[str, Param]) -> None:
        self._items = dict(sorted(given.items()))

    def __getitem__(self, name: str) -> Param:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """A method and its parameters. Equal values have equal hashes and build equal caches.

    Parameters that are not named have the method's defaults. Whether the method has them, and takes their values, is
    seen when caches are built: a config needs no method to be installed. Raises InvalidParams for values that are
    impossible for any method.
    """

    method: str
    params: Mapping[str, Param] = field(default_factory=dict)
    head_dim: int | None = None
    """Width of one head's K and of its V. None: what the model has; a standalone cache needs one."""
    layers: tuple[int, ...] | None = None
    """Entries of the model's cache list that are packed, each of which must take it. None: all that can take it."""
    layer_count: int | None = None
    """Entries of the cache list this was made for. None: any."""
    layer_params: tuple[Mapping[str, Param], ...] | None = None
    """Parameters of each of `layers`, beside `params`. None: all are alike, or the method chooses."""

    def __post_init__(self) -> None:
        check_name("method", self.method)
        if not isinstance(self.params, Mapping):
            raise _wrong("params", self.params, "a mapping from names to values")
        for name, value in self.params.items():
            check_value(name, value)
        if self.head_dim is not None:
            check_whole("head_dim", self.head_dim, 1, MAX_WIDTH)
        if self.layer_count is not None:
            check_whole("layer_count", self.layer_count, 0, MAX_WHOLE)
        object.__setattr__(self, "params", Params(self.params))
        given, layers = self.layers, _layers(self.layers, self.layer_count)
        params = _layer_params(self.layer_params, given)
        if params is not None:  # `layers` is put in order, and each one's parameters go with it
            own = dict(zip(given or (), params, strict=True))
            params = tuple(own[index] for index in layers or ())
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "layer_params", params)

    def own_params(self) -> dict[int, Mapping[str, Param]] | None:
        """Each packed layer's own parameters, None where none are named."""
        return None if self.layer_params is None else dict(zip(self.layers or (), self.layer_params, strict=True))

    @classmethod
    def from_plan(cls, plan: Plan | Mapping[str, Any]) -> KVCacheConfig:
        """What a plan chose: its method, parameters and layers.

        `plan` is a Plan, its chosen cache_config, or either as JSON values. The plan's `prefill_step_size` is the
        engine's argument and no part of this. Raises InvalidParams, MethodRefused for a plan that chose nothing.
        """
        chosen = cache_config.read(plan)
        widths = {width for _, *both in chosen.packed_shapes or () for width in both}
        return cls(
            method=chosen.method,
            params=chosen.params,
            head_dim=widths.pop() if len(widths) == 1 else None,
            layers=None if chosen.method == ENGINE_OWN else chosen.packed_layers,
            layer_count=chosen.layer_count,
            layer_params=chosen.layer_params,
        )

    @classmethod
    def of(cls, variant: Variant) -> KVCacheConfig:
        """A variant of the registry, on every layer that can take it."""
        return cls(method=variant.method, params=variant.params)

    @classmethod
    def from_toml(cls, source: str | PathLike[str]) -> KVCacheConfig:
        """Read what `to_toml` writes: a str is the text itself, a Path names a UTF-8 file of at most 1 MiB.

        Raises InvalidParams naming the key: unknown ones too, which are never guessed at.
        """
        text = _read(Path(source)) if isinstance(source, PathLike) else source
        if not isinstance(text, str):
            raise _wrong("config", text, "TOML text or a path")
        try:
            document = bounded_toml.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers too long for Python, and lists too deep
            raise InvalidParams(
                f"the config is not TOML: {error}", hint="a file is named by a pathlib.Path", field="config"
            ) from error
        return cls(**_known(document))

    def to_toml(self) -> str:
        """TOML from which `from_toml` makes an equal value."""
        import tomli_w

        document = {one.name: getattr(self, one.name) for one in fields(self)}
        document["params"] = dict(self.params)
        document["layers"] = None if self.layers is None else list(self.layers)
        document["layer_params"] = None if self.layer_params is None else [dict(one) for one in self.layer_params]
        return tomli_w.dumps({name: value for name, value in document.items() if value not in (None, {})})


def check_name(what: str, name: Any) -> None:
    """A method's name, by its form alone. Raises InvalidParams."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(what, name, "the name of a method")


def check_whole(what: str, value: Any, low: int, high: int) -> None:
    """A whole number within bounds, True and 2.0 refused. Raises InvalidParams."""
    if type(value) is not int or not low <= value <= high:
        raise _wrong(what, value, f"a whole number from {low} to {high}")


def check_value(name: Any, value: Any) -> None:
    """A parameter that some method may have: named, and a whole or finite number, a word or a flag.

    Raises InvalidParams.
    """
    if not isinstance(name, str) or not name or not _encodes(name):
        raise _wrong("params", name, "the name of a parameter")
    if type(value) is bool or (type(value) is str and _encodes(value)):
        return
    if type(value) is int and abs(value) <= MAX_WHOLE:
        return
    if type(value) is not float or not math.isfinite(value):
        raise _wrong(name, value, "a whole or finite number, a word or a flag")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
        return False
    return True


def _layers(layers: Any, count: int | None) -> tuple[int, ...] | None:
    if layers is None:
        return None
    if not isinstance(layers, list | tuple):
        raise _wrong("layers", layers, "a list of whole numbers")
    for index in layers:
        check_whole("layers", index, 0, (MAX_WHOLE if count is None else count) - 1)
    if len(set(layers)) != len(layers):
        raise _wrong("layers", layers, "a list of unlike numbers")
    return tuple(sorted(layers))


def _layer_params(given: Any, layers: Any) -> tuple[Params, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(isinstance(one, Mapping) for one in given):
        raise _wrong("layer_params", given, "a list of mappings from names to values")
    for name, value in (item for one in given for item in one.items()):
        check_value(name, value)
    if layers is None or len(layers) != len(given):
        raise _wrong("layer_params", given, "one mapping for each of `layers`")
    return tuple(map(Params, given))


def _known(document: dict[str, Any]) -> dict[str, Any]:
    names = [one.name for one in fields(KVCacheConfig)]
    unknown = sorted(set(document) - set(names))
    if unknown:
        raise InvalidParams(
            f"the config has no key {quoted(unknown[0])}", hint=f"it has: {', '.join(names)}", field=unknown[0]
        )
    if "method" not in document:
        raise InvalidParams("the config names no method", hint='add a line such as method = "affine"', field="method")
    return document


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise InvalidParams(f"{path} is larger than 1 MiB", hint="name another file", field="config")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParams(f"{path} cannot be read: {error}", hint="name a TOML file", field="config") from error


def _wrong(what: str, value: Any, wanted: str) -> InvalidParams:
    return InvalidParams(f"{what} is {quoted(value)}, not {wanted}", hint=f"set {what} to {wanted}", field=what)

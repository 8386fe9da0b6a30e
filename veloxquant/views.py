"""What a world holds, as plain mappings: the answers to `methods` and `hardware`, alike from daemon and fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import MethodNotFound
from veloxquant.hardware.overrides import with_overrides

if TYPE_CHECKING:
    from veloxquant.local import World
    from veloxquant.methods import Method
    from veloxquant.wire.messages import HardwareParams, MethodsParams

METHODS_SCHEMA = "veloxquant.methods/1"
HARDWARE_SCHEMA = "veloxquant.hardware/1"


def methods(params: MethodsParams, world: World) -> dict[str, Any]:
    """Ready methods with their variants, then fenced ones with the reason. Raises MethodNotFound."""
    fenced = world.snapshot.quarantined
    off = {method.name for method in fenced}
    entries = [_ready(method, world) for method in world.loaded.methods if method.name not in off]
    entries += [{"name": one.name, "state": "quarantined", "reason": one.reason, "variants": []} for one in fenced]
    if params.name is not None:
        entries = [entry for entry in entries if entry["name"] == params.name]
        if not entries:
            raise no_such_method(params.name, world, field="name")
    return {"schema": METHODS_SCHEMA, "generation": world.snapshot.generation, "methods": entries}


def hardware(params: HardwareParams, world: World) -> dict[str, Any]:
    """The machine plans are made for, with the source of each field; with overrides, that machine instead."""
    profile = world.snapshot.hardware
    overrides = params.hardware.given() if params.hardware is not None else {}
    shown = with_overrides(profile, overrides) if overrides else profile
    return {"schema": HARDWARE_SCHEMA, "generation": world.snapshot.generation, **msgspec.to_builtins(shown)}


def no_such_method(name: str, world: World, *, field: str) -> MethodNotFound:
    """The error for a name that is neither ready nor fenced, with the names that come close."""
    import difflib

    known = known_names(world)
    close = difflib.get_close_matches(name, known, n=2)
    return MethodNotFound(
        f"no method is named {name!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}",
        field=field,
    )


def known_names(world: World) -> list[str]:
    """Every method's name, ready or fenced, sorted."""
    return sorted({m.name for m in world.loaded.methods} | {q.name for q in world.snapshot.quarantined})


def _ready(method: Method, world: World) -> dict[str, Any]:
    mine = [variant for owner, variant in world.loaded.variants if owner.name == method.name]
    return {
        "name": method.name,
        "state": "ready",
        "version": method.version,
        "summary": method.summary,
        "paper": method.paper,
        "batchable": method.batchable,
        "trimmable": method.trimmable,
        "drops_tokens": method.drops_tokens,
        "variants": [{"label": variant.label, "params": dict(variant.params)} for variant in mine],
    }

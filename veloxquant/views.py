"""What a world holds, as the answers to `methods`, `hardware` and `records`: alike from daemon and fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.benchmarks.selection import Selection
from veloxquant.errors import MethodNotFound
from veloxquant.hardware.overrides import with_overrides
from veloxquant.methods import describe
from veloxquant.wire.answers import MethodList, MethodRow, RecordPage, SkippedRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.local import World
    from veloxquant.methods import Method
    from veloxquant.planner.snapshot import QuarantinedMethod
    from veloxquant.profiles import HardwareProfile
    from veloxquant.wire.messages import HardwareParams, MethodsParams, RecordsParams


def methods(params: MethodsParams, world: World) -> MethodList:
    """Ready methods with their variants, then fenced ones with the reason. Raises MethodNotFound.

    Figures of variants, and parameters, are told of a method that is asked for by name.
    A fenced method may have the name of a ready one: each has a row, and `source` tells them apart.
    """
    rows = [_ready(method, world, whole=method.name == params.name) for method in world.ready]
    rows += [_fenced(one) for one in world.snapshot.quarantined]
    if params.name is not None and params.name not in known_names(world):
        raise no_such_method(params.name, known_names(world), field="name")
    shown = tuple(row for row in rows if params.name in (None, row.name))
    return MethodList(generation=world.snapshot.generation, methods=shown)


def hardware(params: HardwareParams, world: World) -> HardwareProfile:
    """The machine plans are made for, with the source of each field; with overrides, that machine instead."""
    overrides = params.hardware.given() if params.hardware is not None else {}
    return with_overrides(world.snapshot.hardware, overrides) if overrides else world.snapshot.hardware


def records(
    params: RecordsParams,
    held: Iterable[BenchmarkRecord],
    skipped: Mapping[str, str],
    *,
    directory: Path,
    generation: int,
) -> RecordPage:
    """The page of `held` records that the filters ask for, newest first; `skipped` maps files to reasons."""
    selection = Selection(
        method=params.method,
        model_id=params.model_id,
        architecture=params.architecture,
        chip=params.chip,
        mlx_version=params.mlx_version,
        source=params.source,
        tag=params.tag,
        pinned=params.pinned,
        since_s=params.since_s(),
    )
    wanted = [record for record in held if selection.takes(record)]
    wanted.sort(key=lambda record: (record.created_at, record.id), reverse=True)
    left_out = sorted(skipped.items())[: params.limit] if params.skipped else []
    return RecordPage(
        generation=generation,
        directory=str(directory),
        total=len(wanted),
        offset=params.offset,
        records=tuple(record.to_dict() for record in wanted[params.offset : params.offset + params.limit]),
        skipped_total=len(skipped),
        skipped=tuple(SkippedRecord(file=file, reason=reason) for file, reason in left_out),
    )


def no_such_method(name: str, known: Sequence[str], *, field: str) -> MethodNotFound:
    """The error for a name that is not among `known`, with those that come close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=2)
    return MethodNotFound(
        f"no method is named {name!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}",
        field=field,
    )


def known_names(world: World) -> list[str]:
    """Every method's name, ready or fenced, sorted."""
    return sorted({m.name for m in world.loaded.methods} | {q.name for q in world.snapshot.quarantined})


def _ready(method: Method, world: World, *, whole: bool) -> MethodRow:
    mine = [variant for owner, variant in world.loaded.variants if owner.name == method.name]
    plain = tuple({"label": variant.label, "params": dict(variant.params)} for variant in mine)
    return MethodRow(
        name=method.name,
        state="ready",
        version=method.version,
        summary=method.summary,
        paper=method.paper,
        source=world.loaded.origin(method.name) or None,
        variants=describe.variants(method) if whole else plain,
        batchable=method.batchable,
        trimmable=method.trimmable,
        drops_tokens=method.drops_tokens,
        idea=method.idea,
        keeps=method.keeps,
        fused_attention=method.fused_attention,
        parameters=describe.parameters(method) if whole else (),
    )


def _fenced(one: QuarantinedMethod) -> MethodRow:
    return MethodRow(name=one.name, state="quarantined", reason=one.reason, source=one.distribution or None)

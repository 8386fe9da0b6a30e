"""The last plan this user was shown, kept so that `explain --last` can speak about that very answer."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from veloxquant.errors import PlanNotFound

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.planner.result import Plan


def remember(plan: Plan) -> None:
    """Keep the plan. A full or read-only disk costs `explain --last`, not the answer."""
    import msgspec

    place = _place()
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(plan))
        draft.replace(place)


def recall() -> Plan:
    """The plan kept last. Raises PlanNotFound."""
    import msgspec

    from veloxquant.planner.result import Plan

    try:
        return msgspec.json.decode(_place().read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        raise PlanNotFound(
            "no plan was kept", hint="run veloxquantctl plan first, or give explain a model", field="--last"
        ) from None


def _place() -> Path:
    from veloxquant import paths

    return paths.state_dir() / "last-plan.json"

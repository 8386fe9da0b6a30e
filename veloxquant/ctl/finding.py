"""What a doctor's check says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.config import Config

State = Literal["ok", "note", "failed"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result: "ok"; "note", worth knowing and no obstacle; or "failed", with the fix."""

    state: State
    text: str
    fix: str = ""


if TYPE_CHECKING:
    Check = Callable[[Config], Finding]
    """Takes the configuration; must not block for longer than some seconds."""


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(state="ok", text=text)


def note(text: str, fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(state="note", text=text, fix=fix)


def failed(text: str, fix: str) -> Finding:
    """Something to mend, and how."""
    return Finding(state="failed", text=text, fix=fix)


def existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder

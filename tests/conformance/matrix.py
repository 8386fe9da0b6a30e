"""The short matrix: a small variant of each method on every architecture, a second one on plain attention."""

from __future__ import annotations

import functools

from veloxquant.measure import conformance
from veloxquant.measure.conformance import selection
from veloxquant.methods import registry

PLAIN = "llama"


@functools.cache
def loaded() -> registry.Loaded:
    """The installed methods."""
    return registry.load(only=None)


def cells() -> list[tuple[str, str, str]]:
    """(method, "small" or "second", architecture)."""
    names = [name for name, one in conformance.architectures().items() if one.short]
    found = []
    for method in selection.packing(loaded()):
        found += [(method.name, "small", name) for name in names]
        if selection.second(method) != selection.small(method):
            found.append((method.name, "second", PLAIN))
    return found


@functools.cache
def subject(method_name: str, which: str, architecture: str) -> conformance.Subject:
    """Shared by all checks of a cell, with its prompts and runs."""
    method = loaded().method(method_name)
    variant = getattr(selection, which)(method)
    effort = conformance.PLAIN if (which, architecture) == ("small", PLAIN) else conformance.SHORT
    return conformance.Subject(method, variant, conformance.architecture(architecture), effort)

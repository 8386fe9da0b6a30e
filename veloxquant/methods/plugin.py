"""What the rooms behind discovery say about one plugin: which it is, and why it was fenced off."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

from veloxquant.methods.hookspec import ENTRY_POINT_GROUP

FIRST_PARTY_DISTRIBUTION = "veloxquant"
FIRST_PARTY_PACKAGE = "veloxquant_plugins."


@dataclass(frozen=True, order=True)
class Plugin:
    """One entry point of the group `veloxquant.methods`: `value` is "module" or "module:attribute"."""

    distribution: str
    name: str
    value: str
    version: str = ""
    metadata: str = field(default="", compare=False)
    """The folder that announces it (`.dist-info`), "" where it lies in no folder."""

    @property
    def key(self) -> str:
        """What tells it from all others, as one word."""
        return f"{canonical(self.distribution)}:{self.name}={self.value}"

    @property
    def label(self) -> str:
        """Distribution and version, as a person says them."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def module(self) -> str:
        """The module that is imported. AttributeError when `value` is none of the two forms."""
        try:
            return EntryPoint(self.name, self.value, ENTRY_POINT_GROUP).module
        except (AssertionError, ValueError) as error:  # what Python 3.12 and newer say in place of AttributeError
            raise AttributeError(f"{self.value!r} names no module") from error

    @property
    def first_party(self) -> bool:
        """Shipped in our own wheel: trusted, loaded without a probe."""
        return canonical(self.distribution) == FIRST_PARTY_DISTRIBUTION and self.value.startswith(FIRST_PARTY_PACKAGE)


@dataclass(frozen=True)
class Quarantined:
    """A method, or a plugin whose methods could not be learnt, that is not used, and why, as a sentence."""

    name: str
    distribution: str
    reason: str


def canonical(distribution: str) -> str:
    """A distribution's name as the packaging specification compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()

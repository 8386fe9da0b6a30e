"""The templates of the folder launchd/, which is installed beside this package under a name of its own."""

from __future__ import annotations

from importlib import resources

PACKAGE = "veloxquant_launchd"


def read(name: str) -> str:
    """The template of that name, the same from a checkout and from a wheel."""
    return resources.files(PACKAGE).joinpath(name).read_text(encoding="utf-8")

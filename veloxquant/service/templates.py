"""The templates of the folder launchd/, which is installed beside this package under a name of its own."""

from __future__ import annotations

from importlib import resources

from veloxquant.errors import ServiceRefused

PACKAGE = "veloxquant_launchd"


def read(name: str) -> str:
    """The template of that name, the same from a checkout and from a wheel. Raises ServiceRefused without it."""
    try:
        return resources.files(PACKAGE).joinpath(name).read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):  # a checkout that moved on since it was installed
        raise ServiceRefused(
            f"the agent's template {name} is not installed", hint="install veloxquant again: pip install"
        ) from None

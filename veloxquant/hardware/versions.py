"""Installed versions, from package metadata: mlx_lm is never imported here."""

from __future__ import annotations

from importlib import metadata


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

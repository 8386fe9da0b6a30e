"""Fails to import."""

from __future__ import annotations

import a_package_that_is_not_installed  # noqa: F401

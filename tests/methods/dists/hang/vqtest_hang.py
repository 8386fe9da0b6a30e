"""Hangs while it is imported."""

from __future__ import annotations

import time

time.sleep(3600)

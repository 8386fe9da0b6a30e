"""The short matrix's table at the end of the run; the files of this folder may import each other."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

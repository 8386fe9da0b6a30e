"""What the tests of the client share lies beside them: `scripted`, a daemon that does what it is told."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

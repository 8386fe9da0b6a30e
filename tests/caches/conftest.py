"""The caches' tests share one module that drives batches and single runs beside each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

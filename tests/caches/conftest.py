"""The caches' tests share modules: caches of every kind, batches beside single runs, a look from another process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""The methods' tests share one module that builds their caches and weighs them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

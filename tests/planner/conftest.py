"""The planner's tests share one module of hand-made models, machines and methods."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""R25: writers killed with signal 9 at random moments, and merges at random file operations.

    python bench/reliability/r25_kills.py [--full]

40 kills of each, with `--full` 1,000. After each the directory is opened: what was acknowledged is there, nothing is
half written or left over, and a merge is undone or done. `make faults` runs the same beside other faults.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import merge_kills
import store_faults
from reliability import figures


def main() -> int:
    """Both kinds of kill."""
    times = 1000 if figures.options(__doc__ or "").full else 40
    for what, kills in (("writers", store_faults.kills), ("merges", merge_kills.kills)):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "benchmarks"
            directory.mkdir()
            broken = 0
            try:
                print(kills(directory, times), file=sys.stderr, flush=True)
            except AssertionError as error:
                print(repr(error), file=sys.stderr)
                broken = 1
        figures.say("R25", f"broken directories after {times:,} kills of {what}", broken, "", "0", met=not broken)
    return 0


if __name__ == "__main__":
    sys.exit(main())

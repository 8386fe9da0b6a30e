"""The short matrix's table at the end of the run; the files of this folder may import each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests of the matrix recorded, in whichever process they ran."""
    reports = [one for many in terminalreporter.stats.values() for one in many if getattr(one, "when", "") == "call"]
    recorded = [value for one in reports for name, value in one.user_properties if name == "conformance"]
    if not recorded:
        return
    from veloxquant.ctl.terminal import columns
    from veloxquant.measure.conformance import Outcome, report

    outcomes = [Outcome(**value) for value in recorded]
    terminalreporter.section(f"conformance ({report.LEGEND})")
    for line in columns(report.rows(outcomes)):
        terminalreporter.write_line(line)

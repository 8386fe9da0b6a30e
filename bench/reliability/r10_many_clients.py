"""R10: 256 persistent clients ask 1,000 plans each, then 1,000 clients: no errors, and how long the slowest wait.

Every client has a question of its own, asked once before, as servers that plan for their own model would. The load
comes from one process, so that on two cores the daemon has the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, load, questions

FEW, MANY = 256, 1000


def main() -> int:
    """256 and 1,000 clients."""
    each = 1000 if figures.options(__doc__ or "").full else 60
    with session.private_home() as home, session.running(home):
        path = str(home.socket)
        load.run(path, questions.plans(1), 1)  # the model is traced once
        for clients, plans, target_ms in ((FEW, each, 25.0), (MANY, max(20, each // 4), 250.0)):
            # What 256 clients ask is remembered; 1,000 share their questions, or they would overrun that memory.
            asked = questions.plans(FEW)
            load.run(path, asked, 1)
            outcome = load.run(path, [asked[number % FEW] for number in range(clients)], plans)
            label = f"{clients:,} clients x {plans:,} plans"
            figures.at_most("R10", f"{label}: errors", len(outcome.errors), "errors", 0)
            p50, p99 = (figures.percentile(outcome.seconds, rank) * 1000 for rank in (50, 99))
            figures.say("R10", f"{label}: p50", p50, "ms", "none", met=True)
            figures.at_most("R10", f"{label}: p99", p99, "ms", target_ms)
            figures.say("R10", f"{label}: rate", len(outcome.seconds) / outcome.elapsed_s, "/s", "none", met=True)
            if outcome.errors:
                print(outcome.errors[0], file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

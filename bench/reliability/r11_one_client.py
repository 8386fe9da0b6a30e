"""R11: one client's plan over the socket, with the methods that ship and 10,000 records: median and p99.

A question asked before, as a server asks that plans for each of its requests; and questions of which each is new.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plan_client
import session
from reliability import figures, many_records, questions

RECORDS = 10_000


def main() -> int:
    """2,000 plans, or 20,000."""
    count = 20_000 if figures.options(__doc__ or "").full else 2_000
    with session.private_home() as home:
        many_records.fill(home.folder / "cache" / "veloxquant" / "benchmarks", RECORDS)
        with session.running(home) as daemon:
            path = str(home.socket)
            asked = questions.plans(1)
            plan_client.times(path, asked, 200)
            again = plan_client.times(path, asked, count)
            new = plan_client.times(path, questions.plans(count // 4)[1:], count // 4 - 1)
            with daemon.client() as client:
                methods, records = len(client.methods().methods), client.status().records.used
    label = f"{methods} methods, {records:,} records"
    for what, seconds, bounds in ((f"asked before, {label}", again, (150.0, 2000.0)), (f"new, {label}", new, None)):
        for rank, place in ((50, 0), (99, 1)):
            value = figures.percentile(seconds, rank) * 1e6
            if bounds is None:
                figures.say("R11", f"a question {what}: p{rank}", value, "us", "none", met=True)
            else:
                figures.at_most("R11", f"a question {what}: p{rank}", value, "us", bounds[place])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

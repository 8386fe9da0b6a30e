"""A daemon under mixed load for an hour: `make soak`, or `python bench/soak.py --minutes 60`.

Fifty clients ask what clients ask, at a pace that leaves the machine room to breathe, since it is the drift of answer
times that is looked for; records appear and go; configuration is reloaded, now and then a broken one; soak_abuse.py
does the rest. Every ten seconds memory, open files, threads, tasks and the times that a probe saw are noted. Writes the
samples as JSON and a picture, and fails when a claim of soak_verdict.py does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import psutil
import session
import soak_plot
from soak_load import Job, Line, Load, keep
from soak_verdict import Claim, Sample, claims

from veloxquant import __version__
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.paths import config_file

ROOT = Path(__file__).parents[1]
WINDOW_S = 10.0
SAVE_EVERY = 6
RECORDS_KEPT = 40
NEW_MODELS, NEW_MODEL_SHARE = 4, 0.05
"""So many models never seen before, this share of the run apart: all within the warm-up, since the daemon remembers 64
of them, some 0.3 MiB each, by design. After that they are asked for again."""
SETTLE_S = 3.0
_QUIET_PLANS = 8
_PROBE_LIMIT = 2**22


class Background:
    """What happens beside the clients: records, reloads, models never seen before."""

    def __init__(self, daemon: session.Daemon, load: Load, minutes: float) -> None:
        self._daemon = daemon
        self._load = load
        self._minutes = minutes
        self._database = BenchmarkDatabase()
        self._published: list[str] = []

    def jobs(self) -> list[Job]:
        """Each at its pace."""
        return [
            Job("records published and deleted", self.publish, 2.0),
            Job("reloads by signal", self.hang_up_signal, 30.0),
            Job("reloads by call", self.reload, 30.0),
            Job("models seen but a few times", self.new_model, self._minutes * 60 * NEW_MODEL_SHARE),
        ]

    async def publish(self, number: int) -> None:
        """A record appears, and the one of some rounds ago goes."""
        await asyncio.to_thread(self._publish, number)

    def _publish(self, number: int) -> None:
        # Lengths come back as people's do: what was read of a workload is remembered, for some thousand of them. They
        # come back later than their record goes: else each would be deleted as it appears, and nothing would change.
        name, context = f"org/soak-{number % 20}", 1024 * (1 + number % (3 * RECORDS_KEPT))
        self._published.append(self._database.add("fp16", name, context_length=context, throughput_tok_s=50.0).id)
        if len(self._published) > RECORDS_KEPT:
            self._database.remove(self._published.pop(0))

    async def new_model(self, number: int) -> None:
        """One that has to be traced; later one of those."""
        await self._load.new_model(number % NEW_MODELS)

    async def hang_up_signal(self, _: int) -> None:
        """SIGHUP, as an editor's hook or a person would send it."""
        self._daemon.process.send_signal(signal.SIGHUP)

    async def reload(self, number: int) -> None:
        """By call; each fourth time the configuration is broken, refused, and mended."""
        line, file = await Line.open(self._load.path), config_file()
        try:
            if number % 4 == 3:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("[daemon]\ndrain_s = -1\n", encoding="utf-8")
                try:
                    await line.call("reload", refused="config_invalid")
                finally:
                    file.unlink()
            await line.call("reload")
        finally:
            await line.close()


class Watch:
    """Samples of the daemon process, and of what it says of itself."""

    def __init__(self, daemon: session.Daemon, load: Load) -> None:
        self._process = psutil.Process(daemon.process.pid)
        self._load = load
        self._began = time.monotonic()
        self._process.cpu_percent()

    async def sample(self, window: dict[str, list[int]]) -> Sample:
        """Now; `window` has the probe's times in microseconds."""
        line = await Line.open(self._load.path)
        status = await line.call("status")
        await line.close()
        own, asked = status["process"], status["requests"]
        times = {f"{name}_{rank}_ms": quantile_ms(window.get(name, []), share) for name, rank, share in _TIMES}
        return Sample(
            at_s=round(time.monotonic() - self._began, 1),
            rss_mib=round(self._process.memory_info().rss / 2**20, 3),
            fds=own["fds"],
            threads=own["threads"],
            tasks=own["tasks"],
            clients=status["clients"]["now"],
            generation=status["generation"],
            requests=asked["total"],
            daemon_p99_ms=asked["p99_ms"] or 0.0,
            cpu_percent=self._process.cpu_percent(),
            load=round(os.getloadavg()[0], 2),
            trouble=self._load.tally.counts["trouble"],
            **times,
        )


_TIMES = [(name, rank, share) for name in ("plan", "ping", "control") for rank, share in (("p50", 0.50), ("p99", 0.99))]


def quantile_ms(times_us: list[int], share: float) -> float:
    """The time that this share stayed within (nearest rank), in ms; 0 when there is none."""
    ordered = sorted(times_us)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000, 4) if ordered else 0.0


async def quiet(watch: Watch, load: Load) -> Sample:
    """The daemon with one client: its pools filled, and everybody else's connections and tasks gone."""
    lines = [await Line.open(load.path) for _ in range(_QUIET_PLANS)]
    questions = ({"model": load.model, "workload": {"context_length": 100 + n}} for n in range(_QUIET_PLANS))
    await asyncio.gather(*(line.call("plan", one) for line, one in zip(lines, questions, strict=True)))
    await lines[0].call("fit", {"model": load.model})
    for line in lines:
        await line.close()
    await asyncio.sleep(SETTLE_S)
    return await watch.sample({})


async def loaded(daemon: session.Daemon, load: Load, watch: Watch, minutes: float, report: Report) -> None:
    """The load, until the time is over; a sample for each window of the probe."""
    over = asyncio.Event()
    jobs = [*await load.jobs(), *Background(daemon, load, minutes).jobs()]
    dice = random.Random(1)  # noqa: S311 -- the pace of a load
    workers = [asyncio.create_task(keep(job, load.tally, over, dice)) for job in jobs]
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "bench" / "soak_probe.py"),
        str(load.path),
        str(WINDOW_S),
        stdout=asyncio.subprocess.PIPE,
        limit=_PROBE_LIMIT,
    )
    assert probe.stdout is not None
    try:
        while time.monotonic() - report.began < minutes * 60 and (line := await probe.stdout.readline()):
            report.add(await watch.sample(json.loads(line)))
    finally:
        over.set()
        if probe.returncode is None:
            probe.kill()
        if await probe.wait() not in (-signal.SIGKILL, 0):
            load.tally.wrong("the probe failed: it lost the daemon, or an answer")
    await asyncio.gather(*workers)
    await load.end()


class Report:
    """The samples so far, on the terminal and on the disk."""

    def __init__(self, load: Load, file: Path) -> None:
        self.began = time.monotonic()
        self.samples: list[Sample] = []
        self._load = load
        self._file = file

    def add(self, sample: Sample) -> None:
        """One more; a line a minute on the terminal, and the file with it."""
        self.samples.append(sample)
        if len(self.samples) % SAVE_EVERY == 1:
            print(
                f"{sample.at_s:6.0f} s  {sample.rss_mib:6.1f} MiB  {sample.fds} files  {sample.tasks} tasks  "
                f"{sample.clients} clients  {sample.requests:,} requests  plan p50 {sample.plan_p50_ms:.2f} "
                f"p99 {sample.plan_p99_ms:.2f} ms  CPU {sample.cpu_percent:.0f} %  {sample.trouble} wrong",
                flush=True,
            )
            self.write([])

    def write(self, found: list[Claim]) -> None:
        """Everything as JSON: conditions, claims, counts, and the samples as rows."""
        names = [one.name for one in fields(Sample)]
        seconds = self.samples[-1].at_s - self.samples[0].at_s if len(self.samples) > 1 else 0.0
        head = {
            "schema": "veloxquant.soak/1",
            "version": __version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "requests_a_second": round((self.samples[-1].requests - self.samples[0].requests) / (seconds or 1), 1),
            "claims": [one.plain() for one in found],
            "counts": dict(sorted(self._load.tally.counts.items())),
            "trouble": self._load.tally.trouble,
            "columns": names,
        }
        rows = ",\n".join(json.dumps([asdict(one)[name] for name in names]) for one in self.samples)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n', encoding="utf-8")


async def soak(daemon: session.Daemon, minutes: float, file: Path, picture: Path) -> list[Claim]:
    """Load, quiet before and after, files written; what it shows."""
    load = Load(daemon.home.socket)
    await load.begin()
    watch, report = Watch(daemon, load), Report(load, file)
    before = await quiet(watch, load)
    await loaded(daemon, load, watch, minutes, report)
    after = await quiet(watch, load)
    found = claims(report.samples, (before, after))
    report.write(found)
    soak_plot.draw(report.samples, f"veloxquant {__version__}: {minutes:g} minutes of mixed load", picture)
    for text in load.tally.trouble:
        print(f"trouble: {text}", file=sys.stderr)
    return found


def main() -> int:
    """0 when every claim holds and the daemon ended well."""
    parser = argparse.ArgumentParser(description="The daemon under mixed load.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--publish", action="store_true", help="into bench/data and docs, not into .cache")
    options: Any = parser.parse_args()
    folder = ROOT / ".cache" / "soak"
    file = ROOT / "bench" / "data" / "reliability" / "soak.json" if options.publish else folder / "soak.json"
    picture = ROOT / "docs" / "soak.svg" if options.publish else folder / "soak.svg"
    with session.private_home() as home:
        home.adopt()
        with session.running(home) as daemon:
            found = asyncio.run(soak(daemon, options.minutes, file, picture))
            code = daemon.stop()
    found.append(Claim("exit status after SIGTERM", code, "", "0", met=code == 0))
    for one in found:
        print(json.dumps({"requirement": "R32", **one.plain(), "load": round(os.getloadavg()[0], 2)}))
        print(f"R32: {one.line()}", file=sys.stderr)
    print(f"samples in {file}, picture in {picture}")
    return 0 if all(one.met for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())

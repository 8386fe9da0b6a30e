#!/usr/bin/env python3
"""A stand-in for macOS's launchctl, scripted by a file of state; nothing of it has been compared with a Mac by us.

Each behaviour is what public sources report (docs/service.md lists the threads):

- verbs, domains, `print` not being an interface: launchctl(1), launchd.plist(5);
- `print` of an absent job 113 with "Could not find service", of an absent domain 112 with "Could not find domain":
  exit codes observed on macOS 26.5 in a public test plan, and NVIDIA/NemoClaw #11121;
- an absent gui domain that answers 125 "Domain does not support specified action": duh17/oppi #31 and #38;
- the form of `print`: boxen/puppet-boxen #104 (fields, `arguments` in braces) and many later threads (`last exit code =
  (never exited)`, `= 78: EX_CONFIG`; states "running", "not running", "spawn scheduled", "SIGTERMed"; inner blocks that
  have fields of the same names);
- `bootout` returns while the job is still ending, with 36 "Operation now in progress" (osquery/osquery #5698) or 0; of
  an absent job 3 "No such process" (TOSS-Soft/toss-agent-runtime #42), lately 5 (jdx/mise #10965); `--wait` is a usage
  error, 64 (pingdotgg/t3code #11995);
- `bootstrap` of a label that is loaded or leaving 5 "Input/output error" (Opendray/opendray #211), or 37 "Operation
  already in progress" (Layr-Labs/d-inference #1102), and 5 for some seconds after the job has gone
  (headroomlabs-ai/headroom #1289); of a disabled label 119 "Service is disabled" (DeterminateSystems/nix-installer
  #530), or 5 (nexu-io/nexu #836); of a bad file or one that others may write 5 (quantonganh.com, 2025-09-26, and the
  "bad ownership" threads);
- `print-disabled` writes "=> disabled", or "=> true" on older systems (DeterminateSystems/nix-installer #555,
  ninehills/blog #85); `disable` outlives the file;
- `kickstart` of a job that is not loaded 113, of one that is just starting 37 (headroomlabs-ai/headroom #1289).

The state lies in $LAUNCHCTL_STAND_IN/state.json, so that one test can run it as a program and look inside.
"""

from __future__ import annotations

import json
import os
import plistlib
import stat
import sys
from pathlib import Path
from typing import Any

UID = 501
_FRESH: dict[str, Any] = {
    "domains": {f"gui/{UID}": 0, f"user/{UID}": 0},  # 0, or the code with which the domain is refused
    "jobs": {},
    "disabled": {},
    "disabled_word": "disabled",
    "disabled_code": 119,
    "linger": 0,  # looks (print) that a job stays for after bootout
    "settle": 0,  # bootstraps that are refused after it has gone
    "settling": 0,
    "busy_code": 5,  # of a bootstrap while the label is taken
    "absent_bootout_code": 3,
    "ends_with": None,  # what a started program ends with at once, as launchctl words it
    "script": [],  # [verb, code, words]: answers given once each, before anything else
    "next_pid": 1000,
    "calls": [],
}
_WORDS = {
    3: "No such process",
    5: "Input/output error",
    36: "Operation now in progress",
    37: "Operation already in progress",
    112: "Could not find domain",
    119: "Service is disabled",
    125: "Domain does not support specified action",
}


class StandIn:
    """launchctl over the state in a folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"
        self.state: dict[str, Any] = json.loads(json.dumps(_FRESH))
        if self._file.exists():
            self.state.update(json.loads(self._file.read_text()))

    def save(self) -> None:
        """Keep the state for the next call."""
        self._file.write_text(json.dumps(self.state, default=str))

    def call(self, words: list[str]) -> tuple[int, str, str]:
        """One call: exit code, stdout, stderr."""
        self.state["calls"].append(words)
        verb = words[0] if words else "help"
        for number, (scripted, code, text) in enumerate(self.state["script"]):
            if scripted == verb:
                del self.state["script"][number]
                return code, "", text
        action = getattr(self, f"_{verb.replace('-', '_')}", None)
        if action is None:
            return 64, "", f"Unrecognized subcommand: {verb}"
        answer: tuple[int, str, str] = action(*words[1:])
        return answer

    def _print(self, target: str) -> tuple[int, str, str]:
        domain, label = _parts(target)
        refused = self._refused(domain)
        if refused:
            return refused, "", f"{_WORDS[refused]} for user {domain.replace('/', ': ')}"
        if label is None:
            return 0, f"{domain} = {{\n\ttype = login\n}}\n", ""
        job = self._looked_at(target)
        if job is None:
            place = domain.replace("/", ": ")
            return 113, "", f'Bad request.\nCould not find service "{label}" in domain for user {place}\n'
        return 0, _printed(target, domain, job), ""

    def _print_disabled(self, domain: str) -> tuple[int, str, str]:
        word = self.state["disabled_word"]
        enabled = {"disabled": "enabled", "true": "false"}[word]
        rows = "".join(
            f'\t\t"{label}" => {word if off else enabled}\n' for label, off in self.state["disabled"].items()
        )
        return 0, f'\n\tdisabled services = {{\n\t\t"com.apple.x" => {word}\n{rows}\t}}\n', ""

    def _enable(self, target: str) -> tuple[int, str, str]:
        self.state["disabled"][_parts(target)[1]] = False
        return 0, "", ""

    def _disable(self, target: str) -> tuple[int, str, str]:
        self.state["disabled"][_parts(target)[1]] = True
        return 0, "", ""

    def _bootstrap(self, domain: str, path: str) -> tuple[int, str, str]:
        code = self._refused(domain) or self._objection(domain, Path(path))
        if code:
            return (
                code,
                "",
                f"Bootstrap failed: {code}: {_WORDS[code]}\nTry re-running the command as root for richer errors.",
            )
        self._load_into(domain, Path(path))
        return 0, "", ""

    def _load(self, path: str) -> tuple[int, str, str]:
        """The verb of before 10.10, which picks the domain by itself and fails in silence."""
        self._load_into(f"gui/{UID}", Path(path))
        return 0, "", ""

    def _bootout(self, target: str, *rest: str) -> tuple[int, str, str]:
        if target.startswith("-") or rest:
            return 64, "", "Unrecognized target specifier."
        job = self.state["jobs"].get(target)
        if job is None or self._refused(_parts(target)[0]):
            code = self.state["absent_bootout_code"]
            return code, "", f"Boot-out failed: {code}: {_WORDS[code]}"
        self.state["settling"] = self.state["settle"]
        if not self.state["linger"]:
            del self.state["jobs"][target]
            return 0, "", ""
        job.update(leaving=self.state["linger"], state="SIGTERMed")
        return 36, "", "Boot-out failed: 36: Operation now in progress"

    def _kickstart(self, *words: str) -> tuple[int, str, str]:
        target = words[-1]
        job = self.state["jobs"].get(target)
        if job is None:
            return 113, "", f'Could not find service "{_parts(target)[1]}" in domain for user gui: {UID}'
        if job.get("leaving"):
            return 37, "", "Could not kickstart service: 37: Operation already in progress"
        if job["pid"] is None or words[0] == "-k":
            self._spawn(job)
        return 0, "", ""

    def _refused(self, domain: str) -> int:
        code: int = self.state["domains"].get(domain, 112)
        return code

    def _looked_at(self, target: str) -> dict[str, Any] | None:
        """The job, a look closer to its end if it is leaving."""
        job: dict[str, Any] | None = self.state["jobs"].get(target)
        if job is None or "leaving" not in job:
            return job
        job["leaving"] -= 1
        if job["leaving"] >= 0:
            return job
        del self.state["jobs"][target]
        return None

    def _objection(self, domain: str, path: Path) -> int:
        """Why the file is not loaded; 0 when it is."""
        if self.state["settling"]:
            self.state["settling"] -= 1
            return 5
        try:
            label = plistlib.loads(path.read_bytes())["Label"]
        except Exception:  # noqa: BLE001 -- whatever is wrong with the file, launchctl says the same
            return 5
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return 5
        if f"{domain}/{label}" in self.state["jobs"]:
            busy: int = self.state["busy_code"]
            return busy
        disabled: int = self.state["disabled_code"]
        return disabled if self.state["disabled"].get(label) else 0

    def _load_into(self, domain: str, path: Path) -> None:
        content = plistlib.loads(path.read_bytes())
        job: dict[str, Any] = {"path": str(path), "content": content, "pid": None, "exit": None, "state": "not running"}
        self.state["jobs"][f"{domain}/{content['Label']}"] = job
        if content.get("RunAtLoad"):
            self._spawn(job)

    def _spawn(self, job: dict[str, Any]) -> None:
        self.state["next_pid"] += 1
        if self.state["ends_with"] is None:
            job.update(pid=self.state["next_pid"], state="running")
        else:
            job.update(pid=None, exit=self.state["ends_with"], state="spawn scheduled")


def _parts(target: str) -> tuple[str, str | None]:
    kind, uid, *label = target.split("/", 2)
    return f"{kind}/{uid}", label[0] if label else None


def _printed(target: str, domain: str, job: dict[str, Any]) -> str:
    """As launchctl shows a job; the inner blocks have fields of the same names, to be told apart by their indent."""
    content = job["content"]
    arguments = "".join(f"\t\t{word}\n" for word in content["ProgramArguments"])
    environment = "".join(f"\t\t{key} => {value}\n" for key, value in content["EnvironmentVariables"].items())
    pid = "" if job["pid"] is None else f"\tpid = {job['pid']}\n"
    ended = job["exit"] or "(never exited)"
    return (
        f"{target} = {{\n\tactive count = 1\n\tpath = {job['path']}\n\ttype = LaunchAgent\n"
        f"\tstate = {job['state']}\n\n\tprogram = {content['ProgramArguments'][0]}\n"
        f"\targuments = {{\n{arguments}\t}}\n\n"
        f"\tenvironment = {{\n{environment}\t\tXPC_SERVICE_NAME => {content['Label']}\n\t}}\n\n"
        f"\tdomain = {domain} [100005]\n\tminimum runtime = 10\n\texit timeout = 15\n\truns = 1\n{pid}"
        f"\tlast exit code = {ended}\n\n\tspawn type = daemon (3)\n"
        f"\tendpoints = {{\n\t\tstate = active\n\t\tpid = 7\n\t}}\n}}\n"
    )


def main() -> int:
    """Run as a program."""
    stand_in = StandIn(Path(os.environ["LAUNCHCTL_STAND_IN"]))
    code, out, err = stand_in.call(sys.argv[1:])
    stand_in.save()
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The helper process of `probe`: forks children that load plugins, watches them, and says what became of each.

Where there are many, a child takes several in turn. Reads a job as JSON from standard input and writes a list of
verdicts to standard output. It has one thread and has imported neither mlx nor anything else that minds a fork.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from veloxquant.errors import MethodRefused
from veloxquant.methods import orphans, surroundings
from veloxquant.methods.checks import check_figures, check_variants
from veloxquant.methods.fence import methods_of, reason_of
from veloxquant.methods.plugin import Plugin
from veloxquant.methods.probe import Limits

AT_ONCE = 4
FEW, TOGETHER = 16, 8
"""Up to FEW plugins have a process each; of more, TOGETHER share one while nothing is wrong with any of them."""
_TICK_S = 0.02
_CHUNK = 64 * 1024
_TOO_SLOW = {
    "import": "importing it took",
    "hook": "its hook took",
    "check": "its planning functions took",
}
_Numbered = tuple[int, Plugin]
"""A plugin and its place in the job."""
_STAGES = tuple(_TOO_SLOW)
_DURING = {"import": "while it was imported", "hook": "in its hook", "check": "in its planning functions"}
_HEAVY = ("mlx", "mlx_lm", "transformers", "torch")
_BEFORE = frozenset(sys.modules)
"""What the interpreter's own start has imported is no plugin's doing."""
_dumps = json.dumps
"""Held fast: a plugin may put another in its place."""
_FUNCTIONS = surroundings.functions()
MEMORY_BYTES = 2**30
"""What a plugin may have written to while it is tried out. Linux only: macOS does not enforce such a limit."""


@dataclass
class _Child:
    """A process that tries out plugins one after another: which is under way, and until when its stage may last."""

    group: list[_Numbered]
    pid: int
    messages: int
    output: int
    deadline: float
    began: float
    at: int = 0
    stage: str = "import"
    text: bytes = b""
    output_bytes: int = 0
    status: int | None = None
    done: bool = False
    """Nothing more is wanted of it."""
    verdicts: dict[int, dict[str, Any]] = field(default_factory=dict)
    open_ends: set[int] = field(default_factory=set)


def main() -> None:
    """Examine the job's plugins, a few at a time."""
    job = json.load(sys.stdin)
    orphans.adopt()
    plugins = [Plugin(**plugin) for plugin in job["plugins"]]
    verdicts = _examine_all(plugins, Limits(**job["limits"]))
    json.dump([verdicts[index] for index in range(len(plugins))], sys.stdout)


def _examine_all(plugins: list[Plugin], limits: Limits) -> dict[int, dict[str, Any]]:
    waiting, running = _groups(list(enumerate(plugins))), list[_Child]()
    verdicts: dict[int, dict[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_start(waiting.pop(0), limits))
            _listen(running, limits)
            for child in running:
                _judge(child, limits)
            for child in [child for child in running if child.done]:
                running.remove(child)
                _end(child)
                orphans.end(known={other.pid for other in running})
                verdicts |= child.verdicts
                waiting[:0] = _left_over(child)
    finally:
        for child in running:
            _end(child)
        orphans.end()
    return verdicts


def _groups(plugins: list[_Numbered]) -> list[list[_Numbered]]:
    """Few plugins have a process each; many share one with some others, since starting one costs more than a plugin."""
    size = 1 if len(plugins) <= FEW else TOGETHER
    return [plugins[at : at + size] for at in range(0, len(plugins), size)]


def _left_over(child: _Child) -> list[list[_Numbered]]:
    """Those the process did not come to. One it ended with has another try alone: another's deed may be to blame."""
    rest = [child.group[child.at :]] if child.at < len(child.group) else []
    last = child.group[child.at - 1]
    again = child.verdicts[last[0]].pop("again", False)
    if again and child.at > 1:
        del child.verdicts[last[0]]
        return [[last], *rest]
    return rest


def _start(group: list[_Numbered], limits: Limits) -> _Child:
    messages, messages_in = os.pipe()
    output, output_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_child(group, messages_in, output_in, limits)
    os.close(messages_in)
    os.close(output_in)
    for end in (messages, output):
        os.set_blocking(end, False)
    now = time.monotonic()
    return _Child(group, pid, messages, output, now + limits.import_s, now, open_ends={messages, output})


def _be_the_child(group: list[_Numbered], messages: int, output: int, limits: Limits) -> NoReturn:
    """Load plugins with their streams in our hands, report, and end without running their exit handlers."""
    try:
        os.setsid()  # a group of its own, so that what it starts ends with it
        orphans.adopt()
        _limit_memory()
        longest = limits.import_s + limits.hook_s + limits.check_s
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        for _, plugin in group:
            signal.alarm(math.ceil(longest) + 5)  # in case the helper is killed and nobody ends us
            verdict = _load(plugin, messages)
            _say(messages, verdict)
            if not verdict["ok"]:
                break  # what it left behind may be anything
    finally:
        os._exit(0)


def _load(plugin: Plugin, messages: int) -> dict[str, Any]:
    before = surroundings.look()

    def on_stage(stage: str) -> None:
        if stage == "hook":  # before anything of ours runs on functions that it replaced
            surroundings.check_unchanged(before, _FUNCTIONS)
        _say(messages, {"stage": stage})

    try:
        methods = methods_of(plugin, on_stage)
        _say(messages, {"stage": "check"})
        for method in methods:
            check_figures(method, check_variants(method))
        _check_light()
        surroundings.check_unchanged(before, _FUNCTIONS)
        _check_alone()
        _flush()
    except BaseException as error:  # noqa: BLE001 -- fence: a planning function may raise anything, SystemExit included
        return {"ok": False, "reason": reason_of(error)}
    return {"ok": True, "reason": ""}


def _flush() -> None:
    """Have what was written counted: from Python 3.14 on 128 KiB of it wait in a stream's buffer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, AttributeError):  # closed, or none
            stream.flush()


def _limit_memory() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(ValueError, OSError):  # a lower limit was set from outside
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _check_alone() -> None:
    if orphans.left():
        orphans.end()
        raise MethodRefused("loading it leaves processes running", hint="start them inside build(), or not at all")


def _check_light() -> None:
    heavy = [name for name in _HEAVY if name in sys.modules and name not in _BEFORE]
    if heavy:
        raise MethodRefused(
            f"loading it imports {', '.join(heavy)}, which the planner must not carry: import inside build()",
            hint="move the import into build()",
        )


def _say(messages: int, message: dict[str, Any]) -> None:
    os.write(messages, _dumps(message).encode() + b"\n")


def _listen(running: list[_Child], limits: Limits) -> None:
    with selectors.DefaultSelector() as selector:
        for child in running:
            for end in child.open_ends:
                selector.register(end, selectors.EVENT_READ, child)
        for key, _ in selector.select(_TICK_S):
            _read(key.data, key.fd, limits)
        if not selector.get_map():
            time.sleep(_TICK_S)
    for child in running:
        if child.status is None:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            child.status = status if pid else None


def _read(child: _Child, end: int, limits: Limits) -> None:
    try:
        data = os.read(end, _CHUNK)
    except BlockingIOError:
        return
    if not data:
        child.open_ends.discard(end)
    elif end == child.output:
        child.output_bytes += len(data)
    else:
        child.text += data
        _take_messages(child, limits)


def _take_messages(child: _Child, limits: Limits) -> None:
    *lines, child.text = child.text.split(b"\n")
    for line in lines:
        if child.done:  # the first word stands
            return
        stage, answer = _message(line)
        if stage is None:
            _drain(child, limits)
            _conclude(child, answer if child.output_bytes <= limits.output_bytes else _flood(child, limits), limits)
        elif _STAGES.index(stage) > _STAGES.index(child.stage):  # a stage said twice gives no more time
            child.stage = stage
            child.deadline = time.monotonic() + _seconds(limits, stage)


def _conclude(child: _Child, verdict: dict[str, Any], limits: Limits) -> None:
    """The verdict of the plugin under way, and on to the next one; a bad one ends the process."""
    now = time.monotonic()
    child.verdicts[child.group[child.at][0]] = {**verdict, "took_s": now - child.began}
    child.at += 1
    child.done = not verdict["ok"] or child.at == len(child.group)
    child.stage, child.output_bytes = "import", 0
    child.began, child.deadline = now, now + limits.import_s


def _message(line: bytes) -> tuple[str | None, dict[str, Any]]:
    """(stage, {}) or (None, verdict). A plugin that writes into our pipe is refused, not believed."""
    with contextlib.suppress(ValueError, AttributeError):
        message = json.loads(line)
        if message.get("stage") in _DURING:
            return message["stage"], {}
        if isinstance(message.get("ok"), bool) and isinstance(message.get("reason"), str):
            again = {} if message["ok"] else {"again": True}
            return None, {"ok": message["ok"], "reason": message["reason"], **again}
    return None, _no("it wrote into the pipe that reports on it")


def _judge(child: _Child, limits: Limits) -> None:
    """See whether the child's present plugin is past a limit, or has ended the process."""
    ended = child.status is not None and child.messages not in child.open_ends
    if ended and not child.done:
        _drain(child, limits)
    if child.done:
        return
    if child.output_bytes > limits.output_bytes:
        _conclude(child, _flood(child, limits), limits)
    elif ended:
        _conclude(child, _no(f"it ended the process ({_how(child.status)}) {_DURING[child.stage]}"), limits)
    elif time.monotonic() > child.deadline:
        slow = f"{_TOO_SLOW[child.stage]} longer than {_seconds(limits, child.stage):g} s"
        _conclude(child, {"ok": False, "reason": slow}, limits)


def _flood(child: _Child, limits: Limits) -> dict[str, Any]:
    return _no(f"it wrote more than {limits.output_bytes // 1024} KiB to its output {_DURING[child.stage]}")


def _seconds(limits: Limits, stage: str) -> float:
    """How long a stage may last."""
    return {"import": limits.import_s, "hook": limits.hook_s, "check": limits.check_s}[stage]


def _drain(child: _Child, limits: Limits) -> None:
    """Take what is left in the pipe: the answer may overtake the output before it."""
    with contextlib.suppress(BlockingIOError):
        while child.output_bytes <= limits.output_bytes and (data := os.read(child.output, _CHUNK)):
            child.output_bytes += len(data)


def _how(status: int | None) -> str:
    code = os.waitstatus_to_exitcode(status or 0)
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


def _no(reason: str) -> dict[str, Any]:
    """A verdict that is worth another try where others came before in the same process."""
    return {"ok": False, "reason": reason, "again": True}


def _end(child: _Child) -> None:
    """Kill the child with everything it started, and collect it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    os.close(child.messages)
    os.close(child.output)

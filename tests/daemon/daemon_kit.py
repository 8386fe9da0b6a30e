"""Real daemons on private sockets, and a plain client that sends exactly what it is told to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant import config
from veloxquant.wire import messages
from veloxquant.wire.codes import from_object

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.daemon.server import Server

PATIENCE_S = 30.0

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
"""Two layers of 2 KV heads of width 64 in bfloat16: 2 x 2 x (64 + 64) x 2 = 1,024 bytes a token."""
TINY_BYTES_PER_TOKEN = 1024


class Wire:
    """One connection. Blocking, with a limit on every wait."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        self.buffer = b""

    def send(self, data: bytes) -> None:
        """Exactly these bytes."""
        self.socket.sendall(data)

    def line(self) -> bytes:
        """The next line without its newline; empty at the end of the stream."""
        while b"\n" not in self.buffer:
            try:
                chunk = self.socket.recv(65536)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                return b""
            self.buffer += chunk
        found, _, self.buffer = self.buffer.partition(b"\n")
        return found

    def ask(self, data: bytes) -> dict[str, Any]:
        """One line for one line."""
        self.send(data + b"\n")
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """The result, or the typed error raised."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        self.send(json.dumps(message).encode() + b"\n")
        answer = messages.decode_answer(self.line())
        assert answer.id == 1
        if answer.error is not msgspec.UNSET:
            raise from_object(answer.error)
        assert isinstance(answer.result, msgspec.Raw)
        return msgspec.json.decode(answer.result)

    def closed(self) -> bool:
        """The daemon closes without another line."""
        return self.line() == b""

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class Daemon:
    """A daemon process in a home of its own."""

    def __init__(
        self,
        home: Path,
        *args: str,
        env: dict[str, str] | None = None,
        socket_path: Path | None = None,
        boot: str | None = None,
    ) -> None:
        self.home = home
        self.socket = socket_path or home / "s" / "d.sock"
        self.records = home / "benchmarks"
        self.log_path = home / f"log{len(list(home.glob('log*')))}"
        self.wires: list[Wire] = []
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "veloxquant.daemon.main", "--socket", str(self.socket), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(home) | (env or {}),
            )

    def log(self) -> str:
        """All it wrote to its standard streams."""
        return self.log_path.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def ready(self) -> Daemon:
        """Wait until it answers."""
        wait_for(lambda: self.process.poll() is not None or self.events("daemon.ready"), "ready")
        assert self.process.poll() is None, self.log()
        return self

    def connect(self) -> Wire:
        """A new connection."""
        wire = Wire(self.socket)
        self.wires.append(wire)
        return wire

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """One call on a connection of its own."""
        wire = Wire(self.socket)
        try:
            return wire.call(method, params)
        finally:
            wire.close()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """Ask it to go, and see that it does."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        finally:
            self.process.kill()
            self.process.wait()
            for wire in self.wires:
                wire.close()


def environment(home: Path) -> dict[str, str]:
    """The environment of a daemon that shares nothing with the user's, nor with other tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VELOXQUANT_", "XDG_", "HF_"))}
    return kept | {"HOME": str(home), "VELOXQUANT_RECORDS": str(home / "benchmarks"), "HF_HUB_OFFLINE": "1"}


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Look again until it holds."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"waited {seconds} s for: {what}")


def in_process(
    folder: Path, scenario: Callable[[Server], None], flags: dict[str, Any] | None = None, **timing: Any
) -> int:
    """Run a daemon inside this process until the scenario, in a thread, has made it stop; its exit status."""
    from veloxquant.daemon.server import Timing, serve

    path = folder / "s" / "d.sock"
    settings = config.load(env={}, flags={"socket.path": str(path), "records.watch": False} | (flags or {}))
    failed: list[BaseException] = []

    def run(server: Server, loop: asyncio.AbstractEventLoop) -> None:
        try:
            scenario(server)
        except BaseException as error:  # noqa: BLE001 -- shown below, in the test's own thread
            failed.append(error)
            loop.call_soon_threadsafe(server.app.ask_to_stop, "SIGTERM")

    def on_ready(server: Server) -> None:
        threads.append(threading.Thread(target=run, args=(server, asyncio.get_running_loop())))
        threads[0].start()

    threads: list[threading.Thread] = []
    status = asyncio.run(serve(settings, on_ready=on_ready, signals=False, timing=Timing(**timing)))
    threads[0].join()
    if failed:
        raise failed[0]
    return status

"""Stand-ins for `veloxquant.methods.worker:load`, named in tests as "engine_factory:NAME"."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from veloxquant.errors import MethodRefused
from veloxquant.profiles.slots import kv_slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from veloxquant.profiles.model import CachePart


class Quantized:
    """mlx-lm's own quantized cache under any (bits, group)."""

    def refuses(self, method: str, label: str, params: Mapping[str, Any], part: CachePart) -> tuple[str, str] | None:
        """Groups must divide both widths."""
        if part.key_width % params["group"] or part.value_width % params["group"]:
            return "width_not_divisible", f"groups of {params['group']} do not divide {part.key_width}"
        return None

    def build(self, method: str, label: str, params: Mapping[str, Any], index: int, part: CachePart) -> Any:
        """A fresh QuantizedKVCache."""
        from mlx_lm.models.cache import QuantizedKVCache

        return QuantizedKVCache(params["group"], params["bits"])

    def declared_bytes(
        self, method: str, label: str, params: Mapping[str, Any], part: CachePart, runs: Iterable[tuple[int, int]]
    ) -> int:
        """Bits + scale and bias for each group, in the format of the keys."""
        bits = params["bits"] + 2 * 8 * part.key_itemsize / params["group"]
        return round(kv_slots(runs) * part.heads * (part.key_width + part.value_width) * bits / 8)


class ByLayer(Quantized):
    """8 bits in the first packed layer and 4 in the others, or what a calibration's widths say; counts its slots."""

    def layer_params(self, method: str, label: str, params: Any, parts: Any, calibration: Any) -> Any:
        """The label "calibrated" needs a calibration, "alike" has no parameters by layer."""
        if label == "calibrated" and calibration is None:
            raise MethodRefused("no calibration of this model", hint="run one", field="calibration")
        if label == "alike":
            return ()
        low = 4 if calibration is None else calibration.bits[0]
        return [{"bits": 8 if order == 0 else low} for order, _ in enumerate(sorted(parts))]

    def refuses(self, method: str, label: str, params: Any, part: Any) -> Any:
        """The label "picky" refuses the last layers, under their own parameters."""
        if label == "picky" and params["bits"] == 4:
            return "not_supported_by_engine", "4 bits are too few"
        return super().refuses(method, label, params, part)


class Late(Quantized):
    """Says that it packs nothing before there are 40 tokens; `wrong` bytes too few are declared from there on."""

    wrong = 0

    def first_slot(self, method: str, label: str, params: Any, part: Any) -> int:
        """40 tokens."""
        return 40

    def declared_bytes(self, method: str, label: str, params: Any, part: Any, runs: Any) -> int:
        """As the engine's rule has it, less what is wrong once 40 tokens are there."""
        tokens = sum(tokens * calls for tokens, calls in runs)
        return super().declared_bytes(method, label, params, part, runs) - (self.wrong if tokens >= 40 else 0)


class LateAndBroken(Late):
    """Its caches raise when the 40th token comes."""

    def build(self, *args: Any) -> Any:
        """A QuantizedKVCache that gives up."""
        made = super().build(*args)
        update = made.update_and_fetch

        def give_up(keys: Any, values: Any) -> Any:
            if made.offset + keys.shape[2] >= 40:
                raise ValueError("it cannot pack")
            return update(keys, values)

        made.update_and_fetch = give_up
        return made


class Failing(Quantized):
    """Cannot even say whether it takes a layer."""

    def refuses(self, *args: Any) -> Any:
        """Raise."""
        raise RuntimeError("it cannot count")


class Maskless(Quantized):
    """Its caches make no mask, which a model asks for before its first block."""

    def build(self, *args: Any) -> Any:
        """A QuantizedKVCache without one."""

        def make_mask(*_args: Any, **_options: Any) -> Any:
            raise NotImplementedError("no mask here")

        made = super().build(*args)
        made.make_mask = make_mask
        return made


class Careless(Quantized):
    """Declares one byte too few."""

    def declared_bytes(self, *args: Any) -> int:
        """One byte less than it holds."""
        return super().declared_bytes(*args) - 1


class Slotted(Quantized):
    """Its caches have slots in the place of a __dict__."""

    def build(self, *args: Any) -> Any:
        """A thin shell around a QuantizedKVCache."""
        return _Shell(super().build(*args))


class _Shell:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return self.inner.update_and_fetch(keys, values)


class Deadly(Quantized):
    """Ends or stops the process for the labels that say so, and is like Quantized for the others."""

    def build(self, method: str, label: str, params: Mapping[str, Any], index: int, part: CachePart) -> Any:
        """Do as the label says."""
        if label == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if label == "exit":
            os._exit(9)
        if label == "hang":
            time.sleep(600)
        if label == "raise":
            raise SystemExit("a plugin wants out")
        return super().build(method, label, params, index, part)


def quantized() -> Quantized:
    """The plain one."""
    return Quantized()


def by_layer() -> Quantized:
    """The one whose layers differ."""
    return ByLayer()


def late() -> Quantized:
    """The one that packs later."""
    return Late()


def late_and_wrong() -> Quantized:
    """The one whose arithmetic is wrong once it packs."""
    made = Late()
    made.wrong = 1
    return made


def late_and_broken() -> Quantized:
    """The one whose caches cannot pack."""
    return LateAndBroken()


def failing() -> Quantized:
    """The one that raises while it plans."""
    return Failing()


def maskless() -> Quantized:
    """The one whose caches make no mask."""
    return Maskless()


def careless() -> Quantized:
    """The one whose arithmetic is wrong."""
    return Careless()


def deadly() -> Quantized:
    """The one that ends processes."""
    return Deadly()


def slotted() -> Quantized:
    """The one whose caches cannot be given attributes."""
    return Slotted()


def noisy() -> Quantized:
    """Writes what could be taken for an answer to every stream it finds."""
    for stream in (sys.stdout, sys.stderr):
        for _ in range(2000):
            stream.write('{"type":"failed","kind":"not_supported","message":"forged"}\n' * 20)
        stream.flush()
    return Quantized()


def networked() -> Quantized:
    """Tries to call home."""
    socket.create_connection(("127.0.0.1", 9), timeout=1)
    return Quantized()


def forking() -> Quantized:
    """Copies itself until it is stopped."""
    for _ in range(3):
        if not os.fork():
            time.sleep(60)
    return Quantized()


def curious() -> Quantized:
    """Writes down what the worker can see and do, where the test finds it."""
    import ctypes
    import json
    import resource
    import subprocess
    from pathlib import Path

    folder = Path(os.environ["XDG_CACHE_HOME"])
    seen: dict[str, Any] = {
        "environment": Path("/proc/self/environ").read_text() if sys.platform == "linux" else "",
        "variables": dict(os.environ),
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("CPU", "CORE", "FSIZE")},
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "uid": os.getuid(),
    }
    for name, reach in (
        ("socket", socket.socket),
        ("name", lambda: socket.gethostbyname("localhost")),
        ("program", lambda: subprocess.run(["true"], check=True)),
        ("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {})),
        ("file", lambda: (folder / "large").write_bytes(bytes(17 * 2**20))),
    ):
        try:
            seen[name] = str(reach())
        except OSError as error:
            seen[name] = str(error)
    library = ctypes.CDLL(None, use_errno=True)  # past what Python's audit hooks see
    address = bytes([2, 0, 0, 9, 1, 1, 1, 1]) + bytes(8) if sys.platform == "linux" else b""  # sockaddr_in
    connected = library.connect(library.socket(socket.AF_INET, socket.SOCK_DGRAM, 0), address, len(address))
    seen["native"] = (connected, os.strerror(ctypes.get_errno()))
    (folder / "seen.json").write_text(json.dumps(seen))
    return Quantized()


def hungry() -> Quantized:
    """Computes arrays until it is stopped, in MLX and beside it."""
    import mlx.core as mx

    held = []
    while True:
        mx.eval(array := mx.ones((2**22,)))
        held += [array, bytearray(2**22)]


def unpickling() -> Quantized:
    """Loads a pickle that names a class."""
    pickle.loads(pickle.dumps(PurePosixPath("/")))  # noqa: S301 -- must be refused
    return Quantized()

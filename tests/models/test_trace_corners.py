"""The trace worker's own modules where an engine, a system or a method is unlike what they usually meet."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx_lm.models
import msgspec
import pytest
from probe_kit import CONFIGS

from veloxquant.models.exchange import ProbeRequest, TraceRequest, decode_answers
from veloxquant.models.trace import trace
from veloxquant.models.trace_worker import __main__ as worker
from veloxquant.models.trace_worker import confinement, engine, tracing
from veloxquant.models.trace_worker.factory import load_factory
from veloxquant.models.trace_worker.following import Following
from veloxquant.models.trace_worker.probes import Prober

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.profiles import Probe


def probes(tiny: dict[str, Any], factory: str, *variants: tuple[str, int]) -> list[Probe]:
    """What becomes of variants of one method, (label, group) each, tried one after the other."""
    made = Prober(
        engine.build(tiny, "float16"), tracing.trace(tiny, "float16"), load_factory(f"engine_factory:{factory}")
    )
    asked = [ProbeRequest(method="q", label=label, params={"bits": 8, "group": group}) for label, group in variants]
    return [made.probe(one) for one in asked]


def test_without_mlx_there_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that cannot be imported is an answer of the worker, with what to do, however it is started."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    request = TraceRequest(model_id="m", config_json="{}", config_hash="h", dtype="float16", factory="", probes=())
    found = trace(request, timeout_s=30).failed
    assert found is not None
    assert (found.kind, found.hint) == ("engine_missing", "pip install --upgrade mlx")
    assert found.message == "mlx cannot be imported: libmlx.so: cannot open shared object file"
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "veloxquant.models.trace_worker", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(msgspec.json.encode(request) + b"\n")
        started.stdin.flush()  # and open until it is done, or it would go with us
        assert decode_answers(started.stdout.read()) == [found]
        assert started.wait(timeout=30) == 0


def test_the_worker_stays_while_its_parent_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that is: only the end of its standard input ends it."""
    reader, writer = os.pipe()
    os.write(writer, b"x" * 10_000)
    os.close(writer)
    left: list[int] = []
    monkeypatch.setattr(worker.os, "_exit", left.append)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: reader))
    worker._go_with_parent()
    assert left == [3]
    assert os.read(reader, 1) == b"", "all of it was read before"
    os.close(reader)


@pytest.mark.parametrize("event", ["socket.connect", "os.fork", "subprocess.Popen", "pickle.find_class"])
def test_what_is_forbidden_is_named(event: str) -> None:
    """By Python's name of it; reading a file is not."""
    with pytest.raises(PermissionError, match=rf"^{event} is not allowed while tracing a model$"):
        confinement._forbid(event, ())
    confinement._forbid("open", ("config.json", "r", 0))


def test_an_ordinary_user_stays_who_they_are_in_a_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each id stands for itself (user_namespaces(7): setgroups is denied before a group is mapped)."""
    calls: list[int] = []

    class Kernel:
        def unshare(self, flags: int) -> int:
            calls.append(flags)
            return 0 if flags & 0x10000000 else -1

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Kernel())
    monkeypatch.setattr(confinement, "Path", {"/proc/self": tmp_path}.__getitem__)
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    monkeypatch.setattr(os, "getegid", lambda: 20)
    assert confinement._leave_network() == "namespace"
    assert calls == [0x40000000, 0x50000000]
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"setgroups": "deny", "uid_map": "501 501 1", "gid_map": "20 20 1"}


def test_a_system_without_such_a_call_has_the_audit_hook_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library that knows no unshare."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert confinement._leave_network() == "audit"


def test_a_python_file_of_a_models_own_is_never_run(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The engine would import it; here it is named and refused."""
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(engine.EngineRefused, match=r"'own\.py'.*never done"):
        engine.build({**tiny, "model_file": "own.py"}, "float16")


def test_a_package_that_an_engines_module_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the type, which the engine has."""
    (tmp_path / "needy.py").write_text("import a_package_that_nobody_has")
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path)])
    with pytest.raises(engine.EngineRefused, match="needs the package 'a_package_that_nobody_has'") as caught:
        engine.build({"model_type": "needy"}, "float16")
    assert caught.value.hint == "install a_package_that_nobody_has"


def test_a_block_outside_the_models_layers_is_none_of_them() -> None:
    """A model may have one more of the same class, as for predicting a second token; its calls pass through."""

    class Block:
        def __call__(self, x: int) -> int:
            return x + 1

    layers, other = [Block(), Block()], Block()
    seen: list[int | None] = []
    with Following(SimpleNamespace(layers=layers), {}) as followed:
        assert other(layers[1](1)) == 3
        seen.append(followed.block)
    assert seen == [None]
    assert layers[0](1) == 2


def weights(config: dict[str, Any]) -> tuple[int | None, str | None]:
    """Bytes of a traced model's weights, and where they are from."""
    found = tracing.trace(config, "float16")
    return found.weights_bytes, found.weights_source


def test_only_the_experts_of_an_mxfp4_checkpoint_are_packed() -> None:
    """4 bits and one byte of scale for 32 numbers; all else stays in 16 bits, the experts' biases too."""
    config = dict(CONFIGS["gpt_oss"])
    plain = tracing.trace(config, "float16")
    packed = tracing.trace({**config, "quantization_config": {"quant_method": "mxfp4"}}, "float16")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = 3 * hidden * inner * config["num_local_experts"] * config["num_hidden_layers"]
    assert plain.weights_bytes is not None
    assert packed.weights_bytes == plain.weights_bytes - 2 * experts + experts * 17 // 32


@pytest.mark.parametrize("quantization", [{"bits": 4}, {"group_size": 0, "bits": 4}, {"group_size": 64, "bits": "4"}])
def test_a_quantization_that_is_no_numbers_leaves_the_weights_unknown(
    tiny: dict[str, Any], quantization: dict[str, Any]
) -> None:
    """And says why."""
    size, source = weights({**tiny, "quantization": quantization})
    assert size is None
    assert source == "the config's quantization has no whole group_size and bits"


def test_a_quantization_that_mlx_refuses_leaves_the_weights_unknown(tiny: dict[str, Any]) -> None:
    """In MLX's words: it packs no 7 bits."""
    size, source = weights({**tiny, "quantization": {"group_size": 64, "bits": 7}})
    assert size is None
    assert str(source).startswith("the config's quantization cannot be applied: ")
    assert "7" in str(source)


@pytest.mark.usefixtures("factories")
class TestProbes:
    """What a method does that is neither taken nor refused at once."""

    def test_a_planning_half_that_raises_is_the_methods_failure(self, tiny: dict[str, Any]) -> None:
        """In its own words, and the engine's caches stay."""
        (found,) = probes(tiny, "failing", ("a", 32))
        assert found.refused == "the method failed: RuntimeError: it cannot count"
        assert (found.packed, len(found.kept)) == ((), 4)

    def test_a_later_variant_that_its_method_refuses_everywhere_says_why(self, tiny: dict[str, Any]) -> None:
        """Heads are 32 wide."""
        first, later = probes(tiny, "quantized", ("a", 32), ("b", 64))
        assert first.packed == (0, 1, 2, 3)
        assert (later.packed, later.refused) == ((), "groups of 64 do not divide 32")
        assert {layer.reason for layer in later.kept} == {"width"}

    def test_a_variant_after_a_refused_one_is_tried_for_itself(self, tiny: dict[str, Any]) -> None:
        """The first one's builder raised in every layer; that says nothing of the next, and the next nothing of it."""
        found = probes(tiny, "deadly", ("raise", 32), ("good", 32), ("raise", 32))
        assert [one.packed for one in found] == [(), (0, 1, 2, 3), ()]
        assert "a plugin wants out" in str(found[0].refused)
        assert found[2].refused == found[0].refused

    def test_a_cache_that_fails_once_it_packs_is_refused_with_the_length(self, tiny: dict[str, Any]) -> None:
        """It had passed as long as it held tokens as they were."""
        (found,) = probes(tiny, "late_and_broken", ("a", 32))
        assert (found.packed, found.refused) == ((), "after 40 tokens: ValueError: it cannot pack")

    def test_a_failure_outside_all_blocks_is_every_layers(self, tiny: dict[str, Any]) -> None:
        """The mask is made once for all of them, so none can be told apart."""
        (found,) = probes(tiny, "maskless", ("a", 32))
        assert found.packed == ()
        assert {layer.detail for layer in found.kept} == {"NotImplementedError: no mask here"}
        assert {layer.reason for layer in found.kept} == {"engine_error"}

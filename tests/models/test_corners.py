"""Files that change while they are looked at, systems that lack a call, families that leave a width to the config."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant import plain_file
from veloxquant.errors import EngineUnavailable, ModelConfigInvalid
from veloxquant.models import bounded, exchange, profile, resolve, static, store, weights
from veloxquant.profiles import ModelProfile

if TYPE_CHECKING:
    from pathlib import Path


def broken(code: int) -> Any:
    """A call of the system that fails."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_that_goes_while_it_is_looked_at_is_the_oldest(tmp_path: Path) -> None:
    """Its time of change is that of nothing."""
    assert resolve._changed_ns(tmp_path / "gone") == 0
    assert resolve._changed_ns(tmp_path) == tmp_path.stat().st_mtime_ns


def test_a_config_on_a_broken_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the system says."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(plain_file, "read", broken(errno.EIO))
    with pytest.raises(ModelConfigInvalid, match="Input/output error"):
        resolve.resolve(path=str(tmp_path))


def test_a_kept_profile_that_is_too_long_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read at all."""
    store.write(tmp_path, "key", ModelProfile(model_id="m"), complete=True)
    assert store.read(tmp_path, "key") is not None
    monkeypatch.setattr(store, "_MAX_FILE_BYTES", 10)
    monkeypatch.setattr(plain_file, "read", broken(errno.EIO))
    assert store.read(tmp_path, "key") is None


def test_an_index_that_is_too_long_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file of weights that goes while it is weighed."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    monkeypatch.setattr(weights, "_MAX_INDEX_BYTES", 10)
    with pytest.raises(ModelConfigInvalid, match="longer than 10 bytes"):
        weights.read(tmp_path)
    with pytest.raises(ModelConfigInvalid, match="No such file"):
        weights._stamp(tmp_path / "gone")


def test_without_an_engine_the_table_answers_for_the_families_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a note; and there is no version to tell."""
    assert profile._version("no-such-distribution") is None
    monkeypatch.setattr(profile, "engine_version", lambda: None)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 128,
    }
    found = profile.profile(resolve.resolve(config=config), probes=(), factory="", fingerprint="", cache_dir=None)
    assert (found.source, found.layers[0].parts[0].key_width) == ("static", 64)
    assert "mlx-lm is not installed" in found.notes[0]
    with pytest.raises(EngineUnavailable) as caught:
        profile.profile(
            resolve.resolve(config={"model_type": "nobody knows"}),
            probes=(),
            factory="",
            fingerprint="",
            cache_dir=None,
        )
    assert caught.value.hint


def test_a_family_that_leaves_its_width_to_the_config_needs_it_there() -> None:
    """No ratio of other fields stands in for it."""
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 128,
    }
    with pytest.raises(ModelConfigInvalid, match="head_dim"):
        static.read(resolve.resolve(config=config))
    found = static.read(resolve.resolve(config=config | {"head_dim": 96}))
    assert found.layers[0].parts[0].key_width == 96


def test_a_system_without_waitid_is_asked_by_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS is before Python 3.13."""
    monkeypatch.delattr(os, "waitid")
    for code, ended in ((None, False), (0, True)):
        watched: Any = SimpleNamespace(process=SimpleNamespace(poll=lambda code=code: code))
        assert bounded._Watched._exited(watched) == ended


def test_memory_of_a_process_that_is_gone_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from /proc, or told by ps in KiB; what ps does not tell is none either."""
    gone = 2**22 + 1  # more than the kernel numbers
    assert bounded._resident_linux(gone) == 0
    monkeypatch.setattr(bounded.subprocess, "run", lambda *_a, **_k: SimpleNamespace(stdout=b" 1234\n"))
    assert bounded._resident_ps(1) == 1234 * 1024
    monkeypatch.setattr(bounded.subprocess, "run", lambda *_a, **_k: SimpleNamespace(stdout=b"what"))
    assert bounded._resident_ps(1) == 0
    monkeypatch.setattr(bounded.subprocess, "run", broken(errno.ENOENT))
    assert bounded._resident_ps(1) == 0


def test_how_a_process_ended() -> None:
    """In words."""
    assert bounded._how(0) == ""
    assert bounded._how(3) == "exited with status 3"
    assert bounded._how(-9) == "was killed by SIGKILL"
    assert bounded._how(-200) == "was killed by signal 200"


def test_answers_end_at_the_first_line_that_is_none() -> None:
    """What comes after it is not to be trusted, nor is a line without an end."""
    line = msgspec.json.encode(exchange.Failed(kind="config_invalid", message="no"))
    assert len(exchange.decode_answers(line + b"\n" + line + b"\nnonsense\n" + line + b"\n")) == 2
    assert len(exchange.decode_answers(line + b"\n" + line)) == 1
    assert exchange.decode_answers(b"\xff\n" + line + b"\n") == []


def test_a_pipe_that_is_full_waits_and_one_that_is_broken_is_done_with() -> None:
    """Neither is an error of the worker's."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = SimpleNamespace(stderr=None)
    watched: Any = SimpleNamespace(process=process, request=b"x" * 2**24, answers_fd=-1, answer=b"")
    for _ in range(100):  # more than any pipe holds
        assert bounded._Watched._move(watched, writer)
    assert watched.request
    os.close(reader)
    assert not bounded._Watched._move(watched, writer)
    os.close(writer)


def test_what_is_left_in_the_answer_pipe_is_taken_without_waiting() -> None:
    """While a stray child holds the other end, and when nobody does."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    watched: Any = SimpleNamespace(answers_fd=reader, answer=b"a")
    os.write(writer, b"bc")
    bounded._Watched._drain(watched)
    assert watched.answer == b"abc"
    os.write(writer, b"d")
    os.close(writer)
    bounded._Watched._drain(watched)
    assert watched.answer == b"abcd"
    os.close(reader)


def test_a_trace_that_is_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has is the answer, and no worker is started."""
    monkeypatch.setattr(profile, "trace", broken(errno.EIO))
    source = resolve.resolve(config={"model_type": "nobody knows"})
    kept = ModelProfile(model_id="kept", source="traced", num_layers=77)
    store.write(tmp_path, profile._key(source, (), "f", None), kept, complete=True)
    found = profile.profile(source, probes=(), factory="", fingerprint="f", cache_dir=tmp_path)
    assert (found.source, found.num_layers) == ("traced", 77)

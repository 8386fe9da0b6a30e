"""What may lie in a file that is read: configuration, records, models, calibrations, plans, traces.

As in wire_targets, anything but a VeloxError is a find. Each target has one file in a folder of its own, written anew
for every input: what is tested is the reader with all its checks, and not a parser inside it.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

import msgspec

from veloxquant import config as configuration
from veloxquant.benchmarks import exchange as lines
from veloxquant.benchmarks import index, plain_record, record_text
from veloxquant.benchmarks.calibrations import Calibrations, file_name
from veloxquant.benchmarks.exchange import BadLine
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.errors import VeloxError
from veloxquant.models import exchange, resolve, static, store
from veloxquant.profiles import Calibration
from veloxquant.serve.kv_config import KVCacheConfig

_THEN_INDEX = b"\0\0INDEX"


def config(data: bytes) -> None:
    """A configuration file; what is read can be written and read again."""
    place = written("config.toml", data)
    try:
        found = configuration.load(place, {"HOME": "/home/x"})
    except VeloxError as error:
        _helps(error)
        return
    place.write_text(configuration.dump(found), encoding="utf-8")
    assert configuration.load(place, {"HOME": "/home/x"}) == found


def environment(data: bytes) -> None:
    """Variables of the environment: a name and a value in each line."""
    pairs = [line.partition("=") for line in data.decode("utf-8", "surrogateescape").split("\n")]
    env = {f"VELOXQUANT_{name}": value for name, _, value in pairs if "\0" not in name + value}
    env.pop("VELOXQUANT_CONFIG", None)
    try:
        configuration.load(written("config.toml", b""), {**env, "HOME": "/home/x"})
    except VeloxError as error:
        _helps(error)


def record(data: bytes) -> None:
    """A record's file: the short way and the long way agree, and what is read is written back equal."""
    short = plain_record.read_plain(data)
    try:
        found = record_text.decode(data)
    except VeloxError as error:
        _helps(error, unless=short is not None)
        return
    content = msgspec.json.decode(data)
    assert found == BenchmarkRecord.from_dict(content)
    out = io.StringIO()
    lines.write_lines([found], out)
    assert record_text.decode(out.getvalue().encode()).to_dict() == found.to_dict()


def import_(data: bytes) -> None:
    """A file to import, JSON lines or CSV: the first byte says whether its name ends in .csv."""
    for seen, found in lines.read_records(io.BytesIO(data[1:]), named_csv=bool(data[:1] > b"\x7f")):
        assert 0 <= seen <= len(data)
        assert isinstance(found, BadLine | BenchmarkRecord)


def listing(data: bytes) -> None:
    """The index of a benchmark directory, read and made again with what it holds beside the records."""
    found = index.read(written("index.json", data))
    found.differs([("a", "fp16", "org/name", "a.json")])
    if found.problem is None:
        made = b"".join(index.render([("a", "fp16", "org/name", "a.json")], found))
        assert not index.read(written("index.json", made)).differs([("a", "fp16", "org/name", "a.json")])


def model(data: bytes) -> None:
    """A model's config.json, then its family's table."""
    place = written("model/config.json", data)
    try:
        found = static.read(resolve.resolve(path=str(place.parent)))
        msgspec.json.encode(found)
    except VeloxError as error:
        _helps(error)


def weights(data: bytes) -> None:
    """A weight file and the index beside it: the header's length stands first, as the format has it."""
    written("weighed/config.json", b'{"model_type":"llama"}')
    head, between, listed = data.partition(_THEN_INDEX)
    named = written("weighed/model-00001-of-00002.safetensors", len(head).to_bytes(8, "little") + head + bytes(64))
    # The reader remembers a file by its size and time, which inputs of one length within one tick share.
    os.utime(named, ns=(0, time.perf_counter_ns()))
    beside = named.with_name("model.safetensors.index.json")
    beside.unlink(missing_ok=True)
    if between:
        beside.write_bytes(listed)
    try:
        resolve.resolve(path=str(named.parent))
    except VeloxError as error:
        _helps(error)


def calibration(data: bytes) -> None:
    """A calibration under the name that it should have, where it says enough to know."""
    try:
        name = file_name(msgspec.json.decode(data, type=Calibration))
    except (ValueError, RecursionError, VeloxError):
        name = "a-0.json"
    place = written(f"calibrated/calibrations/{name}", data)
    try:
        found = Calibrations(place.parent.parent)
        found.look()
        assert len(found.known) + len(found.skipped) == 1
    finally:
        place.unlink()


def plan(data: bytes) -> None:
    """A plan or its cache_config as a server is handed it, and the same as TOML."""
    try:
        KVCacheConfig.from_plan(msgspec.json.decode(data, type=dict))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    except VeloxError as error:
        _helps(error)
    try:
        text = data.decode()
        found = KVCacheConfig.from_toml(text)
        assert KVCacheConfig.from_toml(found.to_toml()) == found
    except UnicodeDecodeError:
        pass
    except VeloxError as error:
        _helps(error)


def trace(data: bytes) -> None:
    """What a trace worker wrote, and a profile that was kept."""
    exchange.decode_answers(data)
    store.read(written("traces/key.json", data).parent, "key")


def _helps(error: VeloxError, *, unless: bool = False) -> None:
    """A refusal says what to do next; `unless` it should not have been one."""
    assert error.hint
    assert not unless


def written(name: str, data: bytes) -> Path:
    """A file with this content in the folder of this process."""
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(data)
    return path


@cache
def _folder() -> Path:
    """A private one, gone with the process."""
    folder = tempfile.mkdtemp(prefix="vq-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

"""What a checkpoint's weights take, from safetensors headers: no tensor is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from veloxquant import plain_file
from veloxquant.errors import MAX_WHOLE, ModelConfigInvalid, quoted

INDEX = "model.safetensors.index.json"
_PATTERN = "model*.safetensors"
"""What mlx-lm loads from a folder (mlx_lm.utils.load_model)."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

_MAX_HEADER_BYTES = 32 * 2**20
"""The format allows 100 MB; the largest published headers take about 12."""
_MIN_HEADER_BYTES = len(b"{}")
_MAX_HEADERS_BYTES = 256 * 2**20
"""Of all files of a folder: some seconds of reading. Links make many files of one."""
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_FILES = 4096
"""Weight files of one model; the largest published checkpoints have some hundreds."""
_MAX_NAME = 255

_OF_MANY = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FLOATS_8 = ("F8_E4M3", "F8_E5M2")
_OTHER = "other"


class WeightFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of all tensors, and the number format K and V will follow."""

    weights_bytes: int | None = None
    source: str = ""
    """"safetensors", "index" (some files are missing) or "given"."""
    dtype: str | None = None
    """Of the scales in a quantized checkpoint, else of most of the weights; None when it must come from the config."""
    quantized: bool = False
    float8_bytes: int = 0
    """Bytes held as 8-bit floats, which the engine may widen to 16 bits."""
    missing: tuple[str, ...] = ()
    """Files the index or the numbering names that are not there."""
    notes: tuple[str, ...] = ()


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}
    metadata: dict[str, object] = {}


class _File(NamedTuple):
    """What one header says: bytes of its tensors, bytes by number format, bytes of scales by number format."""

    header_bytes: int
    tensor_bytes: int
    formats: Counter[str]
    scale_formats: Counter[str]


def read(folder: Path) -> WeightFacts | None:
    """Facts about the weights in a model folder; None when it has none that mlx-lm would load.

    Raises ModelConfigInvalid naming the file when a header or the index is damaged.
    """
    index = _index(folder / INDEX)
    there = sorted(path for path in folder.glob(_PATTERN) if is_file(path))
    missing = _missing(index, {path.name for path in there})
    if not there and index is None:
        return _pickled(folder)
    files = _files(there)
    held = sum(file.tensor_bytes for file in files)
    stated = _stated_total(index)
    notes: tuple[str, ...] = ()
    if missing and stated is not None:
        notes = (
            *notes,
            f"{len(missing)} weight files are missing, first {_shown(missing[0])}; the index's total is used",
        )
    elif stated is not None and stated != held:
        notes = (*notes, f"{INDEX} states {stated} bytes, the files hold {held}; the files count")
    elif stated is None and (claimed := _claim(index)) is not None:
        notes = (*notes, f"{INDEX} states {quoted(claimed)} bytes, which no checkpoint has; it is not believed")
    return WeightFacts(
        weights_bytes=stated if missing else held,
        source="index" if missing else "safetensors",
        dtype=_dtype(files),
        quantized=any(file.scale_formats for file in files),
        float8_bytes=sum(count for file in files for name, count in file.formats.items() if name in _FLOATS_8),
        missing=missing,
        notes=notes,
    )


def _shown(name: str) -> str:
    """A file's name as a sentence shows it: escaped, and bounded."""
    return quoted(name)[1:-1]


def _pickled(folder: Path) -> WeightFacts | None:
    """A note on weights that are pickles, and so programs: their names are seen, no byte of them is read."""
    found = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    note = f"the folder's weights are pickles ({_shown(found[0])}{more}), which are never read"
    return WeightFacts(notes=(f"{note}: mlx-lm loads safetensors alone",))


def is_file(path: Path) -> bool:
    """Whether a regular file can be seen there; False for anything else, a folder we may not look into included."""
    return os.path.isfile(path)  # noqa: PTH113 -- Path.is_file raises for what it may not see


def _index(path: Path) -> _Index | None:
    try:
        if not is_file(path):
            return None
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise _damaged(path, f"it is longer than {_MAX_INDEX_BYTES} bytes")
        return msgspec.json.decode(plain_file.read(path, _MAX_INDEX_BYTES), type=_Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _claim(index: _Index | None) -> object | None:
    """What the index says all tensors take, whatever it is."""
    return index.metadata.get("total_size") if index is not None else None


def _stated_total(index: _Index | None) -> int | None:
    total = _claim(index)
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    # An index that states more than any machine holds is not believed.
    return total if isinstance(total, int) and not isinstance(total, bool) and 0 < total <= MAX_WHOLE else None


def _missing(index: _Index | None, there: set[str]) -> tuple[str, ...]:
    """Files that are named by the index, or by the numbering of those there, and absent."""
    named = set(index.weight_map.values()) if index is not None else set()
    for name in there:
        if match := _OF_MANY.fullmatch(name):
            count = int(match[2])
            if count > _MAX_FILES or len(named) > _MAX_FILES:
                raise _too_much(f"{name} is one of more than {_MAX_FILES} weight files")
            named.update(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    if len(named) > _MAX_FILES or any(len(name) > _MAX_NAME for name in named):
        raise _too_much(f"it names more than {_MAX_FILES} weight files, or one with a name that no file can have")
    return tuple(sorted(named - there))


def _files(there: list[Path]) -> list[_File]:
    """What each header says. Raises ModelConfigInvalid for more of them than any model has."""
    if len(there) > _MAX_FILES:
        raise _too_much(f"it holds {len(there)} weight files, more than {_MAX_FILES}")
    files, left = [], _MAX_HEADERS_BYTES
    for path in there:
        files.append(_file(str(path), *_stamp(path)))
        left -= files[-1].header_bytes
        if left < 0:
            raise _too_much(f"the headers of its weight files take more than {_MAX_HEADERS_BYTES} bytes")
    return files


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise _damaged(path, str(error)) from error
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2048)
def _file(name: str, size: int, changed_ns: int) -> _File:  # noqa: ARG001 -- changed_ns makes a rewritten file a new key
    """Read one header: 8 bytes of length (little-endian), then JSON (the safetensors format)."""
    path = Path(name)
    try:
        with plain_file.open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if not _MIN_HEADER_BYTES <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"its header claims {length} bytes and the file has {size}")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return _summed(path, header, length, size - 8 - length)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _summed(path: Path, header: dict[str, msgspec.Raw], length: int, room: int) -> _File:
    """Formats by those that matter: what is kept of a header must not grow with it. Raises msgspec's errors."""
    formats: Counter[str] = Counter()
    scales: Counter[str] = Counter()
    for name, raw in header.items():
        tensor = msgspec.json.decode(raw, type=_Tensor)
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= room:
            raise _damaged(
                path, f"tensor {quoted(name)} ends at byte {end} of {room}: the file is cut short or damaged"
            )
        kind = tensor.dtype if tensor.dtype in _FLOATS or tensor.dtype in _FLOATS_8 else _OTHER
        formats[kind] += end - begin
        if name.endswith(".scales"):
            scales[kind] += end - begin
    return _File(length, sum(formats.values()), formats, scales)


def _dtype(files: list[_File]) -> str | None:
    """The format of the scales in a quantized checkpoint; where they are no floats, or none, that of most bytes."""
    for counts in ([file.scale_formats for file in files], [file.formats for file in files]):
        total: Counter[str] = sum(counts, Counter())
        floats = [(count, name) for name, count in total.items() if name in _FLOATS and count > 0]
        if floats:
            return _FLOATS[max(floats)[1]]
    return None


def _too_much(why: str) -> ModelConfigInvalid:
    return ModelConfigInvalid(
        f"the folder is no checkpoint: {why}", hint="give a folder as published for mlx-lm", field="model.path"
    )


def _damaged(path: Path, why: str) -> ModelConfigInvalid:
    return ModelConfigInvalid(f"{path.name} cannot be read: {why}", hint="download the file again", field="model.path")

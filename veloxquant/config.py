"""The configuration: TOML in, one frozen Config out. Defaults < file < environment < flags.

A key is written `section.key`. The file is named by VELOXQUANT_CONFIG or lies where `paths.config_file` says. In the
environment a key is VELOXQUANT_SECTION_KEY in capitals (VELOXQUANT_DAEMON_LOG_LEVEL), lists separated by commas;
VELOXQUANT_SOCKET and VELOXQUANT_RECORDS are short names of `socket.path` and `records.directory`. Sizes may be written
"512MiB" and times "20s" in any layer. Paths are absolute or start with ~/; a flag's path may be relative to the
current folder. An empty path means the platform's default.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_type_hints

import msgspec
from msgspec import Meta

from veloxquant import bounded_toml, ownership, paths, plain_file, units
from veloxquant.errors import MAX_WHOLE, ConfigInvalid, InvalidParams, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PREFIX = "VELOXQUANT_"
"""Of every environment variable of ours."""
_MAX_FILE_BYTES = 2**20
_SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGTP]i?)?[Bb]?$"
_TIME_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|h|d)?$"

Size = Annotated[int, Meta(ge=0, le=MAX_WHOLE, extra_json_schema={"pattern": _SIZE_PATTERN})]
WorkerSize = Annotated[int, Meta(ge=2**28, le=MAX_WHOLE, extra_json_schema={"pattern": _SIZE_PATTERN})]
Seconds = Annotated[float, Meta(gt=0, le=86400, extra_json_schema={"pattern": _TIME_PATTERN})]
PathText = Annotated[str, Meta(pattern=r"^($|/|~/)", max_length=4096)]
LogPath = Annotated[str, Meta(pattern=r"^($|default$|/|~/)", max_length=4096)]
Share = Annotated[float, Meta(ge=0, le=1)]
Connections = Annotated[int, Meta(ge=1, le=65536)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
RecordCount = Annotated[int, Meta(ge=1, le=10_000_000)]
RecordBytes = Annotated[int, Meta(ge=2**20, le=MAX_WHOLE, extra_json_schema={"pattern": _SIZE_PATTERN})]
Names = tuple[Annotated[str, Meta(min_length=1)], ...]


class Socket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the daemon listens; an empty path means the platform's default."""

    path: PathText = ""


class Planner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reserve stays free for activations and the runtime; a record below the threshold (0..1) does not count."""

    reserve_bytes: Size = 512 * 2**20
    match_threshold: Share = 0.6


class Records(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The benchmark directory, whether the daemon watches it, and the most it may hold."""

    directory: PathText = ""
    watch: bool = True
    max_records: RecordCount = 100_000
    max_bytes: RecordBytes = 2**30


class Methods(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of methods that are never offered."""

    disabled: Names = ()


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the worker process that traces a model, and where its results are kept."""

    timeout_s: Seconds = 20.0
    memory_limit_bytes: WorkerSize = 2 * 2**30
    cache_directory: PathText = ""


class Daemon(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process: how many clients, what it logs, how long it waits for open requests at its end."""

    max_connections: Connections = 2048
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: LogPath = "default"
    slow_call_ms: Milliseconds = 1000
    drain_s: Seconds = 2.0
    idle_timeout_s: Seconds = 600.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting, with its default."""

    socket: Socket = Socket()
    planner: Planner = Planner()
    records: Records = Records()
    methods: Methods = Methods()
    trace: Trace = Trace()
    daemon: Daemon = Daemon()


class _Origin(NamedTuple):
    """Where a value was written, as messages put it, and the environment variable if it was one."""

    where: str
    variable: str | None = None


_Written = tuple[str, _Origin, Any]
_SIZES = (Size, WorkerSize, RecordBytes)
_COUNTS = (Connections, RecordCount, Milliseconds)
_PATHS = (PathText, LogPath)
_SECTIONS = get_type_hints(Config)
_LEAVES: dict[str, Any] = {
    f"{section}.{key}": kind
    for section, struct in _SECTIONS.items()
    for key, kind in get_type_hints(struct, include_extras=True).items()
}
_DEFAULT_LOG = "default"
_SHORT_NAMES = {paths.SOCKET_VARIABLE: "socket.path", "VELOXQUANT_RECORDS": "records.directory"}
_OTHER_VARIABLES = frozenset({"VELOXQUANT_CONFIG", "VELOXQUANT_PLUGINS", "VELOXQUANT_TRACE_HOOKS", "VELOXQUANT_PAGER"})
_WORDS = (
    (Size, 'a size such as "512MiB"'),
    (WorkerSize, 'a size such as "2GiB", at least 256MiB'),
    (RecordBytes, 'a size such as "1GiB", at least 1MiB'),
    (RecordCount, "a whole number from 1 to 10000000"),
    (Seconds, 'a time up to a day, such as 20 or "500ms"'),
    (PathText, 'an absolute path or one that starts with ~/, "" for the platform\'s own'),
    (LogPath, 'an absolute path or one that starts with ~/, "default" for the platform\'s log folder, "" for none'),
    (Milliseconds, "a whole number of milliseconds from 1 to 86400000"),
    (Names, "a list of names"),
    (Share, "a number from 0 to 1"),
    (Connections, "a whole number from 1 to 65536"),
    (bool, "true or false"),
)
_COMMAND_LINE = _Origin("the command line")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def load(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    *,
    with_file: bool = True,
) -> Config:
    """Read all layers. `path` None means VELOXQUANT_CONFIG or the default file, which may be absent.

    `flags` maps dotted keys to values; None means not given. Without the file, what the other layers say remains when
    it is broken. Raises ConfigInvalid naming the key or the line.
    """
    values: dict[str, Any] = {}
    file = _file_layer(path, env) if with_file else ()
    for key, origin, value in (*file, *_env_layer(env), *_flag_layer(flags or {})):
        values[key] = _leaf(key, origin, value, env)
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return Config(**{section: struct(**sections[section]) for section, struct in _SECTIONS.items()})


def dump(config: Config) -> str:
    """TOML that `load` reads back to an equal Config."""
    import tomli_w

    return tomli_w.dumps(msgspec.to_builtins(config))


def schema() -> dict[str, Any]:
    """The JSON schema of the file: msgspec's own, with sizes and times also as text, as `load` takes them."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.json.schema(Config)))
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "veloxquant configuration"
    for key, kind in _LEAVES.items():
        section, _, name = key.partition(".")
        if kind in (*_SIZES, Seconds):
            leaf = made["$defs"][_SECTIONS[section].__name__]["properties"][name]
            leaf["type"] = [leaf["type"], "string"]
    return made


def keys() -> tuple[str, ...]:
    """Every dotted key, in the order of the file."""
    return tuple(_LEAVES)


def variable(key: str) -> str:
    """The environment variable of a dotted key: "daemon.log_level" is VELOXQUANT_DAEMON_LOG_LEVEL."""
    return f"{PREFIX}{key.replace('.', '_').upper()}"


def socket_of(config: Config, env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """The socket of a loaded configuration, in which file, environment and flags are already folded.

    Raises SocketRefused as `paths.socket_path` does.
    """
    return paths.socket_path(config.socket.path, {k: v for k, v in env.items() if k != paths.SOCKET_VARIABLE}, platform)


def log_file_of(config: Config, env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path | None:
    """The daemon's log file, None where it is turned off.

    By default one for each socket, so that no two daemons share one. Raises SocketRefused as `socket_of` does.
    """
    if config.daemon.log_file != _DEFAULT_LOG:
        return Path(config.daemon.log_file) if config.daemon.log_file else None
    return paths.log_file(env, platform, socket=socket_of(config, env, platform))


def variables() -> frozenset[str]:
    """Every environment variable that means something to us."""
    return frozenset({variable(key) for key in _LEAVES} | set(_SHORT_NAMES) | _OTHER_VARIABLES)


def _file_layer(path: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Iterator[_Written]:
    """(key, origin, value) of every key in the file."""
    named = path is not None or bool(env.get("VELOXQUANT_CONFIG"))
    place = Path(path) if path is not None else paths.config_file(env)
    origin = _Origin(str(place))
    text = _read_private(place, required=named)
    if text is None:
        return
    for section, entries in _parse(text, place).items():
        if section not in _SECTIONS:
            _unknown(section, origin, _SECTIONS)
        if not isinstance(entries, dict):
            raise ConfigInvalid(
                f"{section} in {place} is {quoted(entries)}, which is no section",
                hint=f"write [{section}] on a line of its own and its keys below",
                field=section,
            )
        for key, value in entries.items():
            if f"{section}.{key}" not in _LEAVES:
                _unknown(f"{section}.{key}", origin, _LEAVES)
            yield f"{section}.{key}", origin, value


def _env_layer(env: Mapping[str, str]) -> Iterator[_Written]:
    """(key, origin, value) of every variable of ours; the short names come last and win. Empty means not given."""
    known = {variable(key): key for key in _LEAVES}
    ours = sorted(name for name in env if name.startswith(PREFIX) and env[name])
    for name in ours:
        section = name.removeprefix(PREFIX).partition("_")[0].lower()
        if name in known:
            yield known[name], _Origin(name, name), _from_text(known[name], env[name])
        elif section in _SECTIONS and name not in _SHORT_NAMES and name not in _OTHER_VARIABLES:
            _unknown(name, _Origin("the environment", name), known)
    for name, key in _SHORT_NAMES.items():
        if env.get(name):
            yield key, _Origin(name, name), env[name]


def _flag_layer(flags: Mapping[str, Any]) -> Iterator[_Written]:
    for key, value in flags.items():
        if key not in _LEAVES:
            _unknown(key, _COMMAND_LINE, _LEAVES)
        if value is None:
            continue
        place = _LEAVES[key] in _PATHS and isinstance(value, (str, Path)) and not str(value).startswith("~/")
        if place and not (_LEAVES[key] == LogPath and value == _DEFAULT_LOG):
            yield key, _COMMAND_LINE, str(Path(value).absolute()) if str(value) else ""
        else:
            yield key, _COMMAND_LINE, _from_text(key, value) if isinstance(value, str) else value


def _from_text(key: str, text: str) -> Any:
    """Text of a variable or a flag as the key's own type; what does not read stays text and is refused later."""
    kind = _LEAVES[key]
    if kind == Names:
        return [name.strip() for name in text.split(",") if name.strip()]
    if kind is bool:
        return _BOOLEANS.get(text.strip().lower(), text)
    if kind in _COUNTS and text.strip().isascii() and text.strip().isdigit():
        return int(text) if len(text) < 20 else text  # noqa: PLR2004 -- beyond any bound, and int() has a limit of its own
    if kind == Share:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _leaf(key: str, origin: _Origin, value: Any, env: Mapping[str, str]) -> Any:
    """One checked value. Raises ConfigInvalid."""
    kind = _LEAVES[key]
    # A variable of the environment or a path may hold any bytes, which no text of ours can.
    if not all(_is_utf8(text) for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
        _refuse(key, origin, f"{quoted(value)} is not UTF-8", "write it with letters that UTF-8 can hold")
    try:
        if kind in _SIZES and isinstance(value, str):
            value = units.parse_size(value)
        elif kind == Seconds and isinstance(value, str):
            value = units.parse_seconds(value)
        made = msgspec.convert(value, kind)
    except InvalidParams as error:
        _refuse(key, origin, f"{error.message}", error.hint)
    except msgspec.ValidationError as error:
        _refuse(key, origin, f"{quoted(value)} is refused: {_reason(key, error)}", _expected(key))
    return str(paths.home(env) / made[2:]) if kind in _PATHS and made.startswith("~/") else made


def _read_private(place: Path, *, required: bool) -> bytes | None:
    """The file's bytes, None when it is absent and need not exist.

    Refused when anybody but us and root can write it, or a folder on the way to it.
    """
    try:
        file = plain_file.open_plain(place)
    except FileNotFoundError:
        if place.is_symlink():
            _refuse_file(place, f"is a link to {place.readlink()}, where nothing is", "mend the link, or remove it")
        if not required:
            return None
        _refuse_file(place, "does not exist", "create it, or leave VELOXQUANT_CONFIG and --config out")
    except plain_file.NotPlain:
        _refuse_file(place, "is not a file", "name a TOML file")
    except (OSError, ValueError) as error:
        _refuse_file(place, f"cannot be read: {error}", f"make it readable: chmod u+r '{place}'")
    try:
        with file:
            _check_private(place, os.fstat(file.fileno()))
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:  # a broken disk, or a folder that went away meanwhile
        _refuse_file(place, f"cannot be read: {error}", "look at the file and its folders with ls -ld")


def _check_private(place: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        _refuse_file(place, f"belongs to user id {facts.st_uid}, not to you", f"use a copy of your own: '{place}'")
    folder = place.resolve().parent
    if folder.stat().st_uid not in (os.geteuid(), 0):
        _refuse_file(place, f"lies in a folder of user id {folder.stat().st_uid}", "keep it in a folder of your own")
    exposed = ownership.exposed(place)
    if exposed is not None:
        _refuse_file(place, exposed.reason, exposed.hint)
    if facts.st_size > _MAX_FILE_BYTES:
        _refuse_file(place, f"holds {facts.st_size} bytes, at most {_MAX_FILE_BYTES} are read", "name a TOML file")


def _parse(data: bytes, place: Path) -> dict[str, Any]:
    try:
        return bounded_toml.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        _refuse_file(place, f"is not UTF-8 (byte {error.start})", "save it as UTF-8")
    except tomllib.TOMLDecodeError as error:
        # The parser names no line for what is wrong with the last one.
        reason = str(error).replace("at end of document", f"at line {data.count(10) + 1}, the end")
        _refuse_file(place, f"is broken TOML: {reason}", "mend the line named; text values need quotes")
    except RecursionError:
        _refuse_file(place, "is nested too deeply", "no key takes nested values")
    except ValueError:
        # Not of the parser's own kind: Python reads no whole number of more than 4,300 digits.
        _refuse_file(place, "holds a number of thousands of digits", "no key takes a number above 2**53")


def _unknown(name: str, origin: _Origin, known: Mapping[str, Any]) -> NoReturn:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise ConfigInvalid(f"{name} in {origin.where} is not known", hint=hint, field=name, variable=origin.variable)


def _refuse(key: str, origin: _Origin, reason: str, hint: str) -> NoReturn:
    raise ConfigInvalid(f"{key} from {origin.where}: {reason}", hint=hint, field=key, variable=origin.variable)


def _refuse_file(place: Path, reason: str, hint: str) -> NoReturn:
    raise ConfigInvalid(f"the configuration file {place} {reason}", hint=hint, field="config")


def _reason(key: str, error: msgspec.ValidationError) -> str:
    if _LEAVES[key] in _PATHS and "regex" in str(error):
        return "it is neither absolute nor starts with ~/"
    return str(error).partition(" - at `$")[0].replace("`", "")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _expected(key: str) -> str:
    """What the key takes, in words, with its default."""
    section, _, name = key.partition(".")
    kind, default = _LEAVES[key], getattr(_SECTIONS[section](), name)
    # Aliases of types compare equal but are not the same objects, so a list of pairs and no mapping.
    words = next((words for alias, words in _WORDS if alias == kind), None) or " or ".join(get_args(kind))
    shown = units.format_size(default) if kind in _SIZES else msgspec.json.encode(default).decode()
    return f"{key} is {words}; the default is {shown}"

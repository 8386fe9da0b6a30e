"""The configuration: layers, refusals, the file that ships and its schema."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant import config, paths
from veloxquant.config import Config, load
from veloxquant.errors import ConfigInvalid

SHIPPED = Path(__file__).parents[2] / "config"


def _write(folder: Path, text: str) -> Path:
    place = folder / "veloxquant.toml"
    place.write_text(text)
    place.chmod(0o600)
    return place


def _refusal(folder: Path, text: str) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        load(_write(folder, text), env={})
    assert caught.value.hint
    return caught.value


def test_no_file_no_variables_no_flags_gives_the_defaults() -> None:
    """Without any layer the defaults rule: 512 MiB reserve, 20 s and 2 GiB for a trace."""
    got = load()
    assert got == Config()
    assert (got.planner.reserve_bytes, got.trace.timeout_s, got.trace.memory_limit_bytes) == (2**29, 20.0, 2**31)


def test_flag_wins_over_environment_over_file_over_default(short_folder: Path) -> None:
    """Each layer overrides the one before it, key by key."""
    place = _write(short_folder, '[daemon]\nlog_level = "debug"\ndrain_s = 1\nmax_connections = 5\n')
    env = {"VELOXQUANT_DAEMON_LOG_LEVEL": "error", "VELOXQUANT_DAEMON_DRAIN_S": "3s"}
    daemon = load(place, env, {"daemon.log_level": "warning", "daemon.drain_s": None}).daemon
    assert (daemon.log_level, daemon.drain_s, daemon.max_connections, daemon.idle_timeout_s) == (
        "warning",
        3.0,
        5,
        600.0,
    )


def test_short_variables_name_socket_and_records() -> None:
    """VELOXQUANT_SOCKET and VELOXQUANT_RECORDS set their keys and win over the long names."""
    env = {
        "VELOXQUANT_SOCKET": "/a/s",
        "VELOXQUANT_RECORDS": "/a/r",
        "VELOXQUANT_RECORDS_DIRECTORY": "/b",
        "HOME": "/h",
    }
    got = load(env=env)
    assert (got.socket.path, got.records.directory) == ("/a/s", "/a/r")


def test_variable_config_names_the_file(short_folder: Path) -> None:
    """VELOXQUANT_CONFIG names the file, and then it must exist."""
    place = _write(short_folder, "[records]\nwatch = false\n")
    assert load(env={"VELOXQUANT_CONFIG": str(place)}).records.watch is False
    with pytest.raises(ConfigInvalid, match="does not exist"):
        load(env={"VELOXQUANT_CONFIG": "/nowhere/x.toml"})


def test_a_link_that_leads_nowhere_is_no_absent_file() -> None:
    """Settings that are kept elsewhere, on a disk that is not there now, would be gone without a word."""
    place = paths.config_file()
    place.parent.mkdir(parents=True)
    assert load() == Config()
    place.symlink_to("/nowhere/veloxquant.toml")
    with pytest.raises(ConfigInvalid, match=r"is a link to /nowhere/veloxquant\.toml, where nothing is"):
        load()


@pytest.mark.parametrize(
    ("name", "text", "section", "key", "expected"),
    [
        ("VELOXQUANT_METHODS_DISABLED", "affine, kivi", "methods", "disabled", ("affine", "kivi")),
        ("VELOXQUANT_RECORDS_WATCH", "off", "records", "watch", False),
        ("VELOXQUANT_PLANNER_RESERVE_BYTES", "1.5 GiB", "planner", "reserve_bytes", 3 * 2**29),
        ("VELOXQUANT_PLANNER_MATCH_THRESHOLD", "0.75", "planner", "match_threshold", 0.75),
        ("VELOXQUANT_DAEMON_MAX_CONNECTIONS", "12", "daemon", "max_connections", 12),
        ("VELOXQUANT_TRACE_TIMEOUT_S", "500ms", "trace", "timeout_s", 0.5),
    ],
)
def test_variables_are_read_by_the_type_of_their_key(
    name: str, text: str, section: str, key: str, expected: object
) -> None:
    """Lists by commas, booleans by word, sizes and times with units."""
    assert getattr(getattr(load(env={name: text, "HOME": "/h"}), section), key) == expected


@pytest.mark.parametrize(
    "name", ["VELOXQUANT_PLUGINS", "VELOXQUANT_TRACE_HOOKS", "VELOXQUANT_PAGER", "VELOXQUANT_FOO", "OTHER"]
)
def test_variables_that_are_no_settings_are_left_alone(name: str) -> None:
    """What does not start like a section of ours is not a setting."""
    assert load(env={name: "1", "HOME": "/h"}) == Config()


def test_misspelt_variable_is_refused_with_the_near_one() -> None:
    """A variable that starts like a section and names no key is an error, not silence."""
    with pytest.raises(ConfigInvalid, match="VELOXQUANT_DAEMON_LOGLEVEL") as caught:
        load(env={"VELOXQUANT_DAEMON_LOGLEVEL": "debug", "HOME": "/h"})
    assert "VELOXQUANT_DAEMON_LOG_LEVEL" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[daemon]\nlog_level = 'loud'\n", "daemon.log_level"),
        ("[daemon]\nmax_connections = 0\n", "daemon.max_connections"),
        ("[daemon]\nmax_connections = true\n", "daemon.max_connections"),
        ("[daemon]\ndrain_s = -1\n", "daemon.drain_s"),
        ("[trace]\ntimeout_s = nan\n", "trace.timeout_s"),
        ("[trace]\ntimeout_s = inf\n", "trace.timeout_s"),
        ("[trace]\nmemory_limit_bytes = '2 potatoes'\n", "trace.memory_limit_bytes"),
        ("[trace]\nmemory_limit_bytes = 1e9\n", "trace.memory_limit_bytes"),
        ("[trace]\nmemory_limit_bytes = '1MiB'\n", "trace.memory_limit_bytes"),
        ("[planner]\nreserve_bytes = -1\n", "planner.reserve_bytes"),
        ("[planner]\nreserve_bytes = 99999999999999999999\n", "planner.reserve_bytes"),
        ("[planner]\nmatch_threshold = 1.5\n", "planner.match_threshold"),
        ("[planner]\nmatch_threshold = nan\n", "planner.match_threshold"),
        ("[records]\nwatch = 1\n", "records.watch"),
        ("[records]\ndirectory = 'relative/folder'\n", "records.directory"),
        ("[methods]\ndisabled = 'affine'\n", "methods.disabled"),
        ("[methods]\ndisabled = [1]\n", "methods.disabled"),
        ("[socket]\npath = 5\n", "socket.path"),
        ("socket = 5\n", "socket"),
    ],
)
def test_wrong_type_or_range_names_the_dotted_key(short_folder: Path, text: str, field: str) -> None:
    """Each wrong value is refused with its key and a hint."""
    assert _refusal(short_folder, text).field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"[daemon]\nmax_connections = 0x{'f' * 5000}", "daemon.max_connections"),
        (f"[planner]\nreserve_bytes = 0x{'f' * 5000}", "planner.reserve_bytes"),
        (f"[methods]\ndisabled = [0x{'f' * 5000}]", "methods.disabled"),
        (f"socket = [0x{'f' * 5000}]", "socket"),
    ],
)
def test_number_that_python_does_not_print_is_refused_by_key(short_folder: Path, text: str, field: str) -> None:
    """Hexadecimal numbers of any length are read, so the refusal must not print them."""
    assert _refusal(short_folder, text).field == field


def test_unknown_key_and_section_are_refused_with_a_near_match(short_folder: Path) -> None:
    """Unknown names are errors that suggest what was probably meant."""
    key = _refusal(short_folder, "[daemon]\nlog_levle = 'info'\n")
    assert (key.field, key.hint) == ("daemon.log_levle", "did you mean daemon.log_level?")
    section = _refusal(short_folder, "[deamon]\nlog_level = 'info'\n")
    assert (section.field, section.hint) == ("deamon", "did you mean daemon?")


def test_broken_toml_names_the_line(short_folder: Path) -> None:
    """A syntax error says at which line, also when it is the last one."""
    assert "line 3" in _refusal(short_folder, "[daemon]\ndrain_s = 1\nlog_level = info\n").message
    assert "line 3" in _refusal(short_folder, "[daemon]\ndrain_s = 1\ndrain_s = 2").message


def test_hint_names_the_choices(short_folder: Path) -> None:
    """A word that is not known is answered with those that are."""
    assert "debug or info or warning or error" in _refusal(short_folder, "[daemon]\nlog_level = 'loud'\n").hint


def test_path_that_is_no_utf8_is_refused() -> None:
    """Such a path could be neither shown as JSON nor written back."""
    with pytest.raises(ConfigInvalid, match="not UTF-8"):
        load(env={"HOME": "/h", "VELOXQUANT_RECORDS": "/\udcff"})


@pytest.mark.parametrize("key", ["planner.match_threshold", "daemon.log_level", "records.watch", "methods.disabled"])
def test_a_variable_that_is_no_utf8_is_refused_whatever_it_sets(key: str) -> None:
    """The environment may hold any bytes; Python shows them as halves of surrogate pairs."""
    with pytest.raises(ConfigInvalid, match="not UTF-8") as caught:
        load(env={config.variable(key): "\udcea"})
    assert caught.value.field == key


@pytest.mark.parametrize("data", [b"\xff\xfe[", b"\x00", b"a = " + b"[" * 5000, b"a = " + b"9" * 5000])
def test_bytes_that_are_no_toml_are_refused(short_folder: Path, data: bytes) -> None:
    """Not UTF-8, NUL bytes, absurd nesting and numbers that Python does not read end in the typed error."""
    place = _write(short_folder, "")
    place.write_bytes(data)
    with pytest.raises(ConfigInvalid):
        load(place, env={})


@pytest.mark.parametrize("which", ["veloxquant.toml", "a", "."])
@pytest.mark.parametrize("mode", [0o722, 0o702])
def test_file_that_others_can_write_is_refused(short_folder: Path, which: str, mode: int) -> None:
    """A configuration that somebody else can change, or put another in the place of; the fix is named."""
    (short_folder / "a").mkdir()
    place = _write(short_folder / "a", "")
    open_one = place if which == place.name else short_folder / which
    open_one.chmod(mode)
    with pytest.raises(ConfigInvalid, match="written by others") as caught:
        load(place, env={})
    assert caught.value.hint == f"chmod go-w '{open_one}'"
    open_one.chmod(0o700)
    assert load(place, env={}) == Config()


def test_a_group_of_several_can_write_it_and_a_private_one_may(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under umask 002 everything belongs to the user's own group and is open to it."""
    place = _write(short_folder, "")
    short_folder.chmod(0o775)
    place.chmod(0o664)
    user = pwd.getpwuid(os.geteuid()).pw_name
    for members, refused in (([], False), ([user], False), ([user, "w"], True)):
        group = grp.struct_group((user, "x", short_folder.stat().st_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda _number, group=group: group)
        if refused:
            with pytest.raises(ConfigInvalid, match=f"open to group {user}"):
                load(place, env={})
        else:
            assert load(place, env={}) == Config()


def test_a_folder_of_another_user_is_refused(short_folder: Path) -> None:
    """Its owner can put another file there. Taken as it is where this runs as root, who alone can give files away."""
    place = _write(short_folder, "")
    if os.geteuid() == 0:
        os.chown(short_folder, 12345, -1)
        with pytest.raises(ConfigInvalid, match="folder of user id 12345"):
            load(place, env={})
        os.chown(short_folder, 0, -1)
    assert load(place, env={}) == Config()


def test_without_the_file_the_other_layers_remain(short_folder: Path) -> None:
    """What a check-up reads when the file is broken."""
    place = _write(short_folder, "broken")
    env = {"VELOXQUANT_CONFIG": str(place), "VELOXQUANT_DAEMON_DRAIN_S": "3s"}
    got = load(env=env, flags={"daemon.max_connections": 5}, with_file=False)
    assert (got.daemon.drain_s, got.daemon.max_connections) == (3.0, 5)


def test_file_of_another_user_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ours nor root's: refused."""
    place = _write(short_folder, "")
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(ConfigInvalid, match="belongs to user id"):
        load(place, env={})


def test_a_folder_or_a_pipe_is_no_configuration(short_folder: Path) -> None:
    """Neither is read, and a pipe does not hang the start."""
    pipe = short_folder / "pipe"
    os.mkfifo(pipe, 0o600)
    for place in (pipe, short_folder):
        with pytest.raises(ConfigInvalid, match="is not a file"):
            load(place, env={})


def test_home_sign_is_expanded_and_a_flag_may_be_relative() -> None:
    """~/ means HOME in every layer; a flag's path is taken from the current folder."""
    got = load(env={"HOME": "/h", "VELOXQUANT_RECORDS": "~/r"}, flags={"trace.cache_directory": "t"})
    assert (got.records.directory, got.trace.cache_directory) == ("/h/r", str(Path.cwd() / "t"))


def test_flag_socket_wins_over_the_variable() -> None:
    """The socket of a loaded configuration honours the flag although VELOXQUANT_SOCKET is set."""
    env = {"VELOXQUANT_SOCKET": "/a/env.sock", "HOME": "/h"}
    assert config.socket_of(load(env=env, flags={"socket.path": "/a/flag.sock"}), env) == Path("/a/flag.sock")
    assert config.socket_of(load(env=env), env) == Path("/a/env.sock")


@pytest.mark.parametrize(
    ("env", "flags", "variable"),
    [
        ({"VELOXQUANT_DAEMON_LOG_LEVEL": "loud"}, {}, "VELOXQUANT_DAEMON_LOG_LEVEL"),
        ({"VELOXQUANT_DAEMON_LOGLEVEL": "info"}, {}, "VELOXQUANT_DAEMON_LOGLEVEL"),
        ({"VELOXQUANT_SOCKET": "relative"}, {}, "VELOXQUANT_SOCKET"),
        ({}, {"daemon.log_level": "VELOXQUANT_DAEMON_LOG_LEVEL"}, None),
        ({}, {"daemon.nope": "1"}, None),
    ],
)
def test_a_refusal_names_the_variable_that_is_wrong(
    env: dict[str, str], flags: dict[str, str], variable: str | None
) -> None:
    """As a value of its own, so that nobody reads it from the sentence; None for a flag and for the file."""
    with pytest.raises(ConfigInvalid) as caught:
        load(env={"HOME": "/h", **env}, flags=flags)
    assert caught.value.variable == variable


def test_a_file_that_is_wrong_is_no_variable(short_folder: Path) -> None:
    """Even where its folder is named as one."""
    folder = short_folder / "VELOXQUANT_SOCKET"
    folder.mkdir()
    for text in ("[daemon]\nlog_level = 'loud'", "[daemon]\nnope = 1", "[nope]", "nope = 1", "["):
        assert _refusal(folder, text).variable is None


def test_unknown_flag_is_refused() -> None:
    """A dotted key from the command line is checked like any other."""
    with pytest.raises(ConfigInvalid, match="the command line"):
        load(env={"HOME": "/h"}, flags={"daemon.nope": 1})


def test_shipped_file_has_every_key_commented_and_equals_the_defaults(short_folder: Path) -> None:
    """config/veloxquant.toml sets nothing as it is; uncommented, it sets every key to its default."""
    text = (SHIPPED / "veloxquant.toml").read_text()
    assert all(section == {} for section in tomllib.loads(text).values())
    bare = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    found = {f"{section}.{key}" for section, entries in tomllib.loads(bare).items() for key in entries}
    assert found == set(config.keys())
    assert load(_write(short_folder, bare), env={}) == Config()


def test_shipped_schema_is_the_schema_of_the_code() -> None:
    """config/veloxquant.schema.json equals what the code gives."""
    assert json.loads((SHIPPED / "veloxquant.schema.json").read_text()) == config.schema()


def _absolute_paths() -> st.SearchStrategy[str]:
    return st.one_of(st.just(""), st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda t: "/" + t))


@given(
    st.builds(
        Config,
        socket=st.builds(config.Socket, path=_absolute_paths()),
        planner=st.builds(
            config.Planner, reserve_bytes=st.integers(0, 2**53), match_threshold=st.floats(0, 1, allow_nan=False)
        ),
        records=st.builds(config.Records, directory=_absolute_paths(), watch=st.booleans()),
        methods=st.builds(
            config.Methods,
            disabled=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4).map(tuple),
        ),
        trace=st.builds(
            config.Trace,
            timeout_s=st.floats(0, 86400, exclude_min=True),
            memory_limit_bytes=st.integers(2**28, 2**53),
            cache_directory=_absolute_paths(),
        ),
        daemon=st.builds(
            config.Daemon,
            max_connections=st.integers(1, 65536),
            log_level=st.sampled_from(["debug", "info", "warning", "error"]),
            log_file=_absolute_paths(),
            drain_s=st.floats(0, 86400, exclude_min=True),
            idle_timeout_s=st.floats(0, 86400, exclude_min=True),
        ),
    )
)
def test_dump_reads_back_equal(made: Config) -> None:
    """Any valid configuration written as TOML is loaded again without a change."""
    with tempfile.TemporaryDirectory() as folder:
        assert load(_write(Path(folder), config.dump(made)), env={"HOME": "/h"}) == made


def test_a_key_of_thousands_of_parts_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The standard reader would take 16 GiB for 128 KiB of it, and a daemon that reloads would be killed."""
    assert "more than 64 dots (at line 2," in _refusal(tmp_path, "[planner]\n" + "a." * 60_000 + "b = 1").message
    assert "more than 64 dots" in _refusal(tmp_path, "[" + "a." * 60_000 + "b]").message
    assert load(_write(tmp_path, "# " + "." * 100), env={}) == Config()

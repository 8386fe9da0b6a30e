"""Where files lie, on both platforms, whatever the environment holds."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from veloxquant import paths
from veloxquant.errors import ConfigInvalid, SocketRefused

HOME = {"HOME": "/home/u"}


def test_socket_order_is_variable_then_config_then_default() -> None:
    """VELOXQUANT_SOCKET wins over the config's value, which wins over the platform's place; empty means not given."""
    env = {**HOME, "VELOXQUANT_SOCKET": "/a/v.sock", "XDG_RUNTIME_DIR": "/run/user/5"}
    assert paths.socket_path("/a/c.sock", env, "linux") == Path("/a/v.sock")
    env["VELOXQUANT_SOCKET"] = ""
    assert paths.socket_path("/a/c.sock", env, "linux") == Path("/a/c.sock")
    assert paths.socket_path("", env, "linux") == Path("/run/user/5/veloxquant/d.sock")


def test_linux_without_runtime_folder_uses_the_state_folder() -> None:
    """A missing, empty or relative XDG value is as if it were not there (XDG base directory specification)."""
    for value in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "run"}):
        assert paths.socket_path(env={**HOME, **value}, platform="linux") == Path(
            "/home/u/.local/state/veloxquant/d.sock"
        )


def test_macos_default_is_application_support_while_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long home moves the socket to the user's temporary folder, which is short."""
    monkeypatch.setattr(paths, "darwin_temp_dir", lambda: Path("/var/folders/zz/T"))
    tail = len("/Library/Application Support/veloxquant/d.sock")
    fits, too_long = "/" + "h" * (103 - tail - 1), "/" + "h" * (103 - tail)
    expected = Path(fits) / "Library/Application Support/veloxquant/d.sock"
    assert paths.socket_path(env={"HOME": fits}, platform="darwin") == expected
    assert len(os.fsencode(expected)) == 103
    assert paths.socket_path(env={"HOME": too_long}, platform="darwin") == Path("/var/folders/zz/T/veloxquant/d.sock")


def test_macos_ignores_xdg() -> None:
    """An agent of launchd does not see a shell's exports; both sides must find the same socket."""
    xdg = {f"XDG_{name}": "/x" for name in ("RUNTIME_DIR", "STATE_HOME", "CACHE_HOME", "CONFIG_HOME")}
    env = {"HOME": "/Users/u", **xdg}
    library = Path("/Users/u/Library")
    assert paths.socket_path(env=env, platform="darwin") == library / "Application Support/veloxquant/d.sock"
    assert paths.cache_dir(env, "darwin") == library / "Caches/veloxquant"
    assert paths.state_dir(env, "darwin") == library / "Application Support/veloxquant"
    assert paths.config_file(env, "darwin") == library / "Application Support/veloxquant/veloxquant.toml"
    assert paths.log_file(env, "darwin") == library / "Logs/veloxquant/daemon.log"


def test_linux_follows_xdg() -> None:
    """Absolute values count, relative ones do not."""
    env = {**HOME, "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "s", "XDG_CONFIG_HOME": "/f"}
    assert paths.cache_dir(env, "linux") == Path("/c/veloxquant")
    assert paths.state_dir(env, "linux") == Path("/home/u/.local/state/veloxquant")
    assert paths.config_file(env, "linux") == Path("/f/veloxquant/veloxquant.toml")
    assert paths.log_file(env, "linux") == Path("/home/u/.local/state/veloxquant/daemon.log")


@pytest.mark.parametrize(("platform", "limit"), [("linux", 107), ("darwin", 103)])
def test_r06_longest_socket_path_works_and_one_more_byte_is_refused(platform: str, limit: int) -> None:
    """103 bytes on macOS, 107 on Linux (sun_path less its NUL); the refusal names count, limit and a way out."""
    longest = "/" + "s" * (limit - 1)
    assert paths.socket_limit_bytes(platform) == limit
    assert paths.socket_path(longest, HOME, platform) == Path(longest)
    with pytest.raises(SocketRefused) as caught:
        paths.socket_path(longest + "s", HOME, platform)
    assert f"{limit + 1} bytes" in caught.value.message
    assert str(limit) in caught.value.message
    assert "VELOXQUANT_SOCKET" in caught.value.hint


def test_socket_length_counts_bytes_not_characters() -> None:
    """Fifty three-byte characters are 150 bytes."""
    with pytest.raises(SocketRefused, match="151 bytes"):
        paths.socket_path("/" + "ソ" * 50, HOME, "linux")


@pytest.mark.parametrize("bad", ["d.sock", "./d.sock", "~other/d.sock", "/a\0b"])
def test_relative_and_nul_socket_paths_are_refused(bad: str) -> None:
    """A relative path would lead client and daemon apart."""
    with pytest.raises(SocketRefused) as caught:
        paths.socket_path(bad, HOME, "linux")
    assert caught.value.hint


def test_home_sign_in_a_socket_path_is_expanded() -> None:
    """TOML and launchd expand nothing, so we do."""
    assert paths.socket_path("~/d.sock", HOME, "linux") == Path("/home/u/d.sock")


@pytest.mark.parametrize("env", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_without_a_usable_home_the_password_database_answers(env: dict[str, str]) -> None:
    """HOME missing, empty or relative."""
    assert paths.home(env) == Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_without_any_home_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a user id that nobody knows."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigInvalid, match="no home") as caught:
        paths.home({})
    assert "HOME" in caught.value.hint


def test_lock_lies_beside_the_socket() -> None:
    """One lock for each socket."""
    assert paths.lock_path(Path("/a/d.sock")) == Path("/a/d.sock.lock")

"""Where our files lie: pure functions of the environment and the platform; nothing is created or opened here.

Linux follows the XDG base directory specification (a relative value is ignored, as it demands). macOS uses Library and
ignores XDG: an agent started by launchd does not see what a shell exports, and client and daemon must agree.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

from veloxquant.errors import ConfigInvalid, SocketRefused

APP = "veloxquant"
SOCKET_NAME = "d.sock"
SOCKET_VARIABLE = "VELOXQUANT_SOCKET"

# <sys/un.h>: sun_path holds 104 bytes on macOS and the BSDs, 108 on Linux, the closing NUL included.
_DARWIN_SOCKET_BYTES = 103
_LINUX_SOCKET_BYTES = 107
# <unistd.h> on macOS: _CS_DARWIN_USER_TEMP_DIR. Python names it from 3.14 on only.
_CS_DARWIN_USER_TEMP_DIR = 65537

Env = Mapping[str, str]


def socket_limit_bytes(platform: str = sys.platform) -> int:
    """The longest usable socket path in bytes, without the closing NUL: 107 on Linux, 103 elsewhere."""
    return _LINUX_SOCKET_BYTES if platform == "linux" else _DARWIN_SOCKET_BYTES


def socket_path(config_value: str | None = None, env: Env = os.environ, platform: str = sys.platform) -> Path:
    """The daemon's socket: VELOXQUANT_SOCKET, else the config's value, else the platform's default.

    Raises SocketRefused for a path that is relative, holds a NUL, or is longer than the system allows.
    """
    given = env.get(SOCKET_VARIABLE)
    if given:
        return _checked_socket(_expand(given, env), SOCKET_VARIABLE, env, platform)
    if config_value:
        return _checked_socket(_expand(config_value, env), "the socket path", env, platform)
    return _checked_socket(_default_socket(env, platform), "the default socket path", env, platform)


def lock_path(socket: Path) -> Path:
    """The lock that a daemon holds for this socket: a file beside it."""
    return socket.with_name(socket.name + ".lock")


def cache_dir(env: Env = os.environ, platform: str = sys.platform) -> Path:
    """For what can be computed again: traces, calibrations."""
    if platform == "darwin":
        return home(env) / "Library" / "Caches" / APP
    return xdg("XDG_CACHE_HOME", ".cache", env) / APP


def state_dir(env: Env = os.environ, platform: str = sys.platform) -> Path:
    """For what should outlive a restart and is no setting."""
    if platform == "darwin":
        return home(env) / "Library" / "Application Support" / APP
    return xdg("XDG_STATE_HOME", ".local/state", env) / APP


def config_file(env: Env = os.environ, platform: str = sys.platform) -> Path:
    """The configuration file: VELOXQUANT_CONFIG, else the platform's default (it need not exist)."""
    given = env.get("VELOXQUANT_CONFIG")
    if given:
        return _expand(given, env)
    if platform == "darwin":
        return home(env) / "Library" / "Application Support" / APP / f"{APP}.toml"
    return xdg("XDG_CONFIG_HOME", ".config", env) / APP / f"{APP}.toml"


def log_file(env: Env = os.environ, platform: str = sys.platform, *, socket: Path | None = None) -> Path:
    """The log of the daemon at the default socket; that of another socket has the socket's digest in its name."""
    usual = socket is None or socket == _default_socket(env, platform)
    name = "daemon.log" if usual else f"daemon-{_digest(socket)}.log"
    if platform == "darwin":
        return home(env) / "Library" / "Logs" / APP / name
    return state_dir(env, platform) / name


def home(env: Env = os.environ) -> Path:
    """The user's home: an absolute HOME, else the password database.

    Raises ConfigInvalid when neither knows one (a container with a made-up user id).
    """
    given = env.get("HOME", "")
    if given.startswith("/"):
        return Path(given)
    try:
        known = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        known = ""
    if known.startswith("/"):
        return Path(known)
    raise ConfigInvalid(
        f"HOME is {given!r} and the system knows no home for user id {os.getuid()}",
        hint="set HOME to an absolute path",
        field="HOME",
    )


def xdg(variable: str, below_home: str, env: Env) -> Path:
    """The folder that the variable names, else this one of the home: a relative value counts as unset."""
    value = env.get(variable, "")
    return Path(value) if value.startswith("/") else home(env) / below_home


def darwin_temp_dir() -> Path | None:
    """The user's own temporary folder on macOS, None where there is none. Apple only: not run on a Mac."""
    try:
        value = os.confstr(_CS_DARWIN_USER_TEMP_DIR)
    except (ValueError, OSError):
        return None
    return Path(value) if value and value.startswith("/") else None


def _default_socket(env: Env, platform: str) -> Path:
    if platform != "darwin":
        runtime = env.get("XDG_RUNTIME_DIR", "")
        return (Path(runtime) / APP if runtime.startswith("/") else state_dir(env, platform)) / SOCKET_NAME
    usual = state_dir(env, platform) / SOCKET_NAME
    temporary = darwin_temp_dir()
    if _length(usual) <= socket_limit_bytes(platform) or temporary is None:
        return usual
    return temporary / APP / SOCKET_NAME


def _checked_socket(path: Path, origin: str, env: Env, platform: str) -> Path:
    text, limit = str(path), socket_limit_bytes(platform)
    if "\0" in text:
        raise SocketRefused(f"{origin} holds a NUL byte", hint="give a plain path", field="socket.path")
    if not path.is_absolute():
        raise SocketRefused(
            f"{origin} is {text!r}, which is relative: client and daemon would look in different folders",
            hint=f"give an absolute path, such as {_short_socket(env)}",
            field="socket.path",
        )
    if _length(path) > limit:
        raise SocketRefused(
            f"{origin} is {_length(path)} bytes long, the system allows {limit}: {text}",
            hint=f"set VELOXQUANT_SOCKET to a shorter path, such as {_short_socket(env)}",
            field="socket.path",
        )
    return path


def _short_socket(env: Env) -> Path:
    """A path that is short enough on every system, private to the user once its folder is made with mode 0700."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    near = Path(runtime) / APP / SOCKET_NAME
    if runtime.startswith("/") and _length(near) <= _DARWIN_SOCKET_BYTES:
        return near
    return Path(f"/tmp/{APP}-{os.getuid()}") / SOCKET_NAME  # noqa: S108 -- named to the user, never opened here


def _expand(text: str, env: Env) -> Path:
    """A leading ~/ means our home; shells expand it, TOML and launchd do not."""
    return home(env) / text[2:] if text.startswith("~/") else Path(text)


def _digest(path: Path | None) -> str:
    import hashlib  # a few milliseconds that most who import this module need not wait for

    return hashlib.sha256(os.fsencode(str(path))).hexdigest()[:8]


def _length(path: Path) -> int:
    return len(os.fsencode(path))

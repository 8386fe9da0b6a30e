"""Which variables of the environment our processes keep: an allow list, since a secret may have any name.

Tokens of hubs and clouds lie in the environment of nearly every shell. A plugin may put what it sees into an error
text, and error texts are answered and logged. So the daemon forgets what it does not know, and the processes that run
other people's code never get it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_KNOWN = frozenset(
    {
        # the user, and where files lie
        "HOME",
        "LOGNAME",
        "PATH",
        "SHELL",
        "TMPDIR",
        "USER",
        # words, numbers and times
        "LANG",
        "LANGUAGE",
        "NO_COLOR",
        "TERM",
        "TZ",
        "__CF_USER_TEXT_ENCODING",
        # Python and the libraries it loads
        "CONDA_PREFIX",
        "DYLD_FALLBACK_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONNOUSERSITE",
        "PYTHONPATH",
        "PYTHONPYCACHEPREFIX",
        "PYTHONUNBUFFERED",
        "PYTHONUTF8",
        "PYTHONWARNINGS",
        "VIRTUAL_ENV",
        # where the hub keeps downloads
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HUGGINGFACE_HUB_CACHE",
        # what a service manager hands over
        "LISTEN_FDNAMES",
        "LISTEN_FDS",
        "LISTEN_PID",
        "NOTIFY_SOCKET",
    }
)
_KNOWN_PREFIXES = ("LC_", "MLX_", "VELOXQUANT_", "XDG_")
_SHORTEST = 6
"""Letters of a value that could be a secret; shorter ones occur in any text."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def known(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that are kept, without any whose name sounds like a secret's."""
    return {name: value for name, value in env.items() if _is_known(name)}


def forget_unknown() -> None:
    """Remove all others from this process's environment, and so from what its code and children can ask for.

    The block the process was started with stays readable to its own user where the system shows it
    (/proc/PID/environ).
    """
    for name in [name for name in os.environ if not _is_known(name)]:
        del os.environ[name]


def without_secrets(text: str, env: Mapping[str, str] = os.environ) -> str:
    """A stranger's text with the values of variables that are not kept replaced by their names.

    For processes that are not ours to clean: a program that plans without a daemon has its whole environment.
    """
    hidden = {value: name for name, value in env.items() if len(value) >= _SHORTEST and not _is_known(name)}
    for value in sorted(hidden, key=len, reverse=True):  # the longest first: one may be part of another
        text = text.replace(value, f"({hidden[value]})")
    return text


def _is_known(name: str) -> bool:
    return (name in _KNOWN or name.startswith(_KNOWN_PREFIXES)) and not _SECRET.search(name)

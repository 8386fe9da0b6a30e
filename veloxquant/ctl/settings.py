"""The configuration: `show` every key with its value, `check` the file, or print its `path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.config/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which file."""
    parser.add_argument("action", choices=("show", "check", "path"), metavar="show|check|path")
    parser.add_argument("file", nargs="?", metavar="FILE", help="instead of VELOXQUANT_CONFIG or the default file")


def run(session: Session) -> int:
    """Raises ConfigInvalid (exit 2) naming the key or the line."""
    from veloxquant import paths
    from veloxquant.config import dump, load

    options, terminal = session.options, session.terminal
    path = options.file or str(paths.config_file())
    exists = options.file is not None or paths.config_file().exists()
    if options.action == "path":
        return _tell(session, {"path": path, "exists": exists}, path)
    config = load(options.file, flags={"socket.path": options.socket})
    if options.action == "check":
        verdict = "is valid" if exists else "does not exist; every default applies"
        return _tell(session, {"path": path, "exists": exists, "valid": True}, f"{path} {verdict}")
    if terminal.json:
        terminal.value(SCHEMA, {"path": path, "exists": exists, "config": config})
    else:
        terminal.say(f"# {path if exists else 'no file'}; the environment and flags are folded in")
        terminal.say(dump(config).rstrip())
    return 0


def _tell(session: Session, value: dict[str, object], text: str) -> int:
    if session.terminal.json:
        session.terminal.value(SCHEMA, value)
    else:
        session.terminal.say(text)
    return 0

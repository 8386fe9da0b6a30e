"""A completion script for bash, zsh or fish; the scripts ask this program, so that they never go stale.

bash: eval "$(veloxquantctl completion bash)"      zsh: eval "$(veloxquantctl completion zsh)"
fish: veloxquantctl completion fish | source
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from veloxquant.ctl.arguments import PROGRAM, Parser, add_globals
from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.completion/1"
LIMIT_S = 0.1
"""How long a daemon may take to name its methods before the shell's user notices."""

BASH = f"""_{PROGRAM}() {{
    local IFS=$'\\n'
    COMPREPLY=($("${{COMP_WORDS[0]}}" completion words "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _{PROGRAM} {PROGRAM}"""

ZSH = f"""#compdef {PROGRAM}
_{PROGRAM}() {{
    local -a found
    found=("${{(@f)$("${{words[1]}}" completion words "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "${{found[1]}}" ]]; then compadd -a found; else _files; fi
}}
if [[ "${{funcstack[1]}}" == "_{PROGRAM}" ]]; then _{PROGRAM} "$@"; else compdef _{PROGRAM} {PROGRAM}; fi"""

FISH = f"""function __{PROGRAM}
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l program $before[1]
    set -e before[1]
    set -l found ($program completion words $before "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c {PROGRAM} -f -a '(__{PROGRAM})'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_DAEMON_FLAGS = ("--config", "--help", "--log-file", "--log-level", "--records", "--socket", "--version")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="bash|zsh|fish")


def run(session: Session) -> int:
    """Print the script."""
    shell = session.options.shell
    if session.terminal.json:
        session.terminal.value(SCHEMA, {"shell": shell, "script": SCRIPTS[shell]})
    else:
        session.terminal.say(SCRIPTS[shell])
    return 0


def run_raw(_before: Sequence[str], after: Sequence[str]) -> int | None:
    """`completion words WORD...`: what the scripts call, with the words so far, the one under the cursor last."""
    if list(after[:1]) != ["words"]:
        return None
    for word in candidates(after[1:] or [""]):
        print(word)  # noqa: T201 -- the shell reads our stdout
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """What may stand where the last of `words` stands, given those before it."""
    from veloxquant.ctl.main import COMMANDS, split

    current, done = words[-1], words[:-1]
    _, command, after = split(done)
    if command is None:
        offered: Iterable[str] = _values_or_flags(_parser(None), done, current) or COMMANDS
    elif command == "daemon":
        offered = _DAEMON_FLAGS
    elif command in COMMANDS:
        offered = _values_or_flags(_parser(command), after, current)
    else:
        offered = ()
    return sorted({word for word in offered if word.startswith(current)})


def _parser(command: str | None) -> Parser:
    parser = Parser(prog=PROGRAM)
    if command is not None:
        from veloxquant.ctl.main import COMMANDS

        importlib.import_module(f"veloxquant.ctl.{COMMANDS[command][0]}").arguments(parser)
    add_globals(parser)
    return parser


def _values_or_flags(parser: Parser, done: Sequence[str], current: str) -> list[str]:
    """Values for the flag that stands before the cursor, else flags, else the choices of positional arguments."""
    options = {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 -- no public list
    before = next((word for word in reversed(done) if word.startswith("-")), "")
    action = options.get(before)
    takes = action is not None and action.nargs != 0
    if takes and action is not None and (done[-1] == before or action.nargs == "+") and not current.startswith("-"):
        return _values(action)
    if current.startswith("-"):
        return list(options)
    words = [word for word in done if not word.startswith("-")]
    positional = [one for one in parser._actions if not one.option_strings]  # noqa: SLF001 -- no public list
    return _values(positional[len(words)]) if len(words) < len(positional) else []


def _values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in ("method", "name"):
        return [name for name, _ in _methods()]
    if action.dest == "label":
        return [label for _, labels in _methods() for label in labels]
    return []


def _methods() -> list[tuple[str, list[str]]]:
    """(name, labels) of every method, as the daemon says within a tenth of a second; nothing without a daemon."""
    from veloxquant.client import Client

    try:
        rows = Client(timeout_s=LIMIT_S, fallback=False).methods().methods
    except VeloxError:
        return []
    return [(row.name, [str(variant["label"]) for variant in row.variants]) for row in rows]

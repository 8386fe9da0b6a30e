"""veloxquantctl: finds the command, imports its file and nothing else's, and turns its end into an exit code.

0 done; 1 the answer is no; 2 usage; 3 daemon not running; 4 daemon not answering; 5 internal; 75 another instance holds
the lock; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from veloxquant import __version__
from veloxquant.ctl.arguments import GLOBALS_WITH_VALUE, PROGRAM, Parser, add_globals, unknown_word
from veloxquant.ctl.session import Session
from veloxquant.ctl.terminal import Terminal, Unwritable
from veloxquant.daemon import streams
from veloxquant.errors import InvalidParams, VeloxError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "status": ("status", "how the daemon is"),
    "metrics": ("metrics", "the daemon's numbers for Prometheus"),
    "logs": ("logs", "what the daemon wrote down"),
    "plan": ("plan", "which KV cache for a model and a workload"),
    "fit": ("fit", "the largest context of every variant"),
    "explain": ("explain", "the arithmetic behind a plan"),
    "methods": ("methods", "which methods are ready"),
    "profile": ("profile", "run a model with a method's caches and measure them"),
    "sensitivity": ("sensitivity", "calibrate a model for methods that deal out bits"),
    "records": ("records", "list, show, verify, merge, export, import, pin and prune what was measured"),
    "hardware": ("hardware", "the machine as plans see it"),
    "doctor": ("doctor", "check everything, with a fix for each problem"),
    "daemon": ("daemon", "run the daemon in the foreground"),
    "service": ("service", "install the daemon as a background agent, and control it"),
    "reload": ("reload", "have the daemon read its configuration again"),
    "wait": ("wait", "wait until the daemon answers"),
    "socket": ("socket_path", "print the socket's path"),
    "config": ("settings", "show, check or locate the configuration"),
    "version": ("version", "versions of this program and of the daemon"),
    "completion": ("completion", "a completion script for bash, zsh or fish"),
}
"""Command -> (its file in this folder, what it does)."""

INTERRUPTED = 130
_INTERNAL = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    streams.ensure()
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminal = Terminal.of_process(arguments)
    try:
        status = run(arguments, terminal)
        terminal.flush()
    except BrokenPipeError:
        # The reader has seen enough (| head).
        _drop_output()
        return 0
    except Unwritable as error:
        _drop_output()
        terminal.complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _drop_output() -> None:
    """What could not be written goes nowhere: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str], terminal: Terminal) -> int:
    """One command with errors shown; everything but an interrupt and a closed pipe ends here."""
    try:
        return _command(arguments, terminal)
    except VeloxError as error:
        terminal.fail(error)
        return error.exit_code
    except SystemExit as end:  # argparse after --help and --version
        return end.code if isinstance(end.code, int) else 0
    except (BrokenPipeError, Unwritable):
        raise
    except Exception as error:
        # The fence: a person gets a sentence, and may ask for the rest.
        if os.environ.get("VELOXQUANT_TRACEBACK"):
            raise
        hint = "set VELOXQUANT_TRACEBACK=1 to see where, and report it"
        terminal.fail(VeloxError(f"{PROGRAM} failed: {type(error).__name__}: {error}", hint=hint))
        return _INTERNAL


def _command(arguments: Sequence[str], terminal: Terminal) -> int:
    if terminal.json and "--version" in arguments:
        # As every answer: one object. What the command of that name says, has the version in it.
        arguments = ["version", *(one for one in split(arguments)[0] if one != "--version")]
    before, word, after = split(arguments)
    if word is None:
        return _without_command(before, terminal)
    if word not in COMMANDS:
        raise unknown_word(word, list(COMMANDS), "command")
    module = importlib.import_module(f"veloxquant.ctl.{COMMANDS[word][0]}")
    status: int | None = module.run_raw(before, after) if hasattr(module, "run_raw") else None
    if status is not None:
        return status
    parser = Parser(prog=f"{PROGRAM} {word}", description=(module.__doc__ or "").partition("\n\n")[0])
    module.arguments(parser)
    add_globals(parser)
    session = Session(parser.parse([*before, *after]), terminal)
    try:
        return int(module.run(session))
    finally:
        session.close()


def split(arguments: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """(flags before the command, the command, what follows it). A flag's value is not taken for the command."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] in GLOBALS_WITH_VALUE else 1
    word = arguments[position] if position < len(arguments) else None
    return list(arguments[:position]), word, list(arguments[position + 1 :])


def _without_command(flags: Sequence[str], terminal: Terminal) -> int:
    listed = "\n".join(f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [options]",
        description=f"Plan KV caches for language models on MLX (veloxquant {__version__}).",
        epilog=f"commands:\n{listed}\n\n{PROGRAM} COMMAND --help says more. Flags may stand before the command, too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_globals(parser)
    parser.parse(flags)
    if terminal.json:
        raise InvalidParams("no command was given", hint=f"{PROGRAM} --help lists them")
    terminal.err.write(parser.format_help())
    return 2


if __name__ == "__main__":
    sys.exit(main())

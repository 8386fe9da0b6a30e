"""Completion: the same words in every shell, from the grammar itself and from the daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.ctl.completion import candidates
from veloxquant.ctl.main import COMMANDS
from veloxquant.wire import answers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.client import FakeTransport

METHODS = answers.MethodList(
    generation=1,
    methods=(
        answers.MethodRow(
            name="affine",
            state="ready",
            variants=({"label": "affine4-g64", "params": {}}, {"label": "affine8-g64", "params": {}}),
        ),
        answers.MethodRow(name="fp16", state="ready", variants=({"label": "fp16", "params": {}},)),
    ),
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], sorted(COMMANDS)),
        (["pl"], ["plan"]),
        (["--json", "st"], ["status"]),
        (["--color", ""], ["always", "auto", "never"]),
        (["plan", "--objective", ""], ["balanced", "latency", "memory", "quality", "throughput"]),
        (["plan", "--model", "x", "--we"], ["--weights"]),
        (["config", ""], ["check", "path", "show"]),
        (["completion", "z"], ["zsh"]),
        (["records", "export", "--s"], ["--since", "--skipped", "--socket", "--source"]),
        (["records", "list", "--chip", ""], []),
        (["plan", "--context", ""], []),
        (["nonsense", ""], []),
        (["daemon", "--log-"], ["--log-file", "--log-level"]),
    ],
)
def test_words_from_the_grammar(words: list[str], expected: list[str]) -> None:
    """Commands, flags, choices: whatever may stand at the cursor."""
    assert candidates(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "--method", ""], ["affine", "fp16"]),
        (["plan", "--method", "affine", "f"], ["fp16"]),
        (["methods", "show", "a"], ["affine"]),
        (["explain", "affine"], ["affine4-g64", "affine8-g64"]),
    ],
)
def test_names_from_the_daemon(fake: FakeTransport, words: list[str], expected: list[str]) -> None:
    """Methods and variants are asked from the daemon, plugins included."""
    fake.answers["methods"] = METHODS
    assert candidates(words) == expected


def test_without_a_daemon_names_are_left_out() -> None:
    """No daemon costs nothing but the names."""
    assert candidates(["plan", "--method", ""]) == []


def test_words_reach_the_shell_through_the_program(ctl: Callable[..., Any]) -> None:
    """The scripts call `completion words`, with flags passed as words and not obeyed."""
    assert ctl("completion", "words", "plan", "--json", "--max-k").out == "--max-kl\n"


def test_scripts_as_json(ctl: Callable[..., Any]) -> None:
    """--json wraps the script."""
    assert json.loads(ctl("completion", "fish", "--json").out)["shell"] == "fish"


def test_bash_completes(short_folder: Path, ctl: Callable[..., Any]) -> None:
    """The script runs in a real bash: sourced, called as readline calls it, the words are there."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = short_folder / "veloxquantctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m veloxquant.ctl.main "$@"\n')
    program.chmod(0o755)
    script = ctl("completion", "bash").out + (
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _veloxquantctl; echo "${COMPREPLY[*]}"; }\n'
        "complete -p veloxquantctl\n"
        "try veloxquantctl pl\n"
        'try veloxquantctl plan --objective ""\n'
        "try veloxquantctl plan --no\n"
    )
    environment = {**os.environ, "PATH": f"{short_folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [bash, "--norc", "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o default -F _veloxquantctl veloxquantctl",
        "plan",
        "balanced latency memory quality throughput",
        "--no-daemon",
    ]

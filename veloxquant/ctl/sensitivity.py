"""Calibrate a model: how much it minds each layer's K and V in few bits. Methods that deal out bits plan by the result.

One forward and a few backward passes over a text; the result is kept in the benchmark directory, and a running daemon
plans with it from the moment it is there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.ctl.arguments import count
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from veloxquant.benchmarks.calibrations import Calibrations
    from veloxquant.ctl.session import Session
    from veloxquant.models.resolve import ModelSource
    from veloxquant.profiles import Calibration, LayerSensitivity

SCHEMA = "veloxquant.sensitivity/1"
_TOKENS = 512
_MAX_TOKENS = 8192
_MAX_TEXT_BYTES = 16 * 2**20
_LETTERS_A_TOKEN = 12
"""No tokenizer takes more on such a text."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Model, text, effort, and where the result goes."""
    parser.add_argument("model", metavar="MODEL", help="a model folder, or an id of the hub cache")
    parser.add_argument("--text", metavar="FILE", help="what the model reads, UTF-8 (else Python's own help topics)")
    parser.add_argument(
        "--tokens", metavar="N", type=count("--tokens"), default=_TOKENS, help=f"to read, of the text ({_TOKENS})"
    )
    parser.add_argument(
        "--draws", metavar="N", type=count("--draws"), default=4, help="backward passes: more is surer, and slower (4)"
    )
    parser.add_argument("--records", "--benchmarks", metavar="DIR", help="the benchmark directory to put the result in")


class _Read(NamedTuple):
    """The text as the model gets it."""

    name: str
    ids: list[int]


class _Result(NamedTuple):
    """What was found, how long that took, where it is."""

    calibration: Calibration
    seconds: float
    path: Path


def run(session: Session) -> int:
    """Measure, keep, show. Raises what is wrong with model, text or directory before the weights are read."""
    from veloxquant import local
    from veloxquant.benchmarks.calibrations import Calibrations
    from veloxquant.ctl.profile_input import source

    session.may_create_records = True
    found = source(session.options.model)
    store = Calibrations(local.records_directory(session.config))
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not mix with our data
        text = _text(session, found)
        store.make_ready()
        result = _measured(session, found, text, store)
    _show(session, result)
    return 0


def _text(session: Session, found: ModelSource) -> _Read:
    """Raises InvalidParams for a text that cannot be read or has too few tokens."""
    from veloxquant.ctl.profile_input import file_text
    from veloxquant.measure import loading
    from veloxquant.measure.sensitivity import LEAST_TOKENS

    options = session.options
    if not LEAST_TOKENS <= options.tokens <= _MAX_TOKENS:
        raise InvalidParams(
            f"--tokens is {options.tokens}", hint=f"give {LEAST_TOKENS} to {_MAX_TOKENS}", field="--tokens"
        )
    if not options.draws:
        raise InvalidParams("--draws is 0: nothing would be measured", hint="give 1 or more", field="--draws")
    if options.text is None:
        name, text = f"pydoc topics of Python {sys.version_info.major}.{sys.version_info.minor}", _topics()
        text = text[: _LETTERS_A_TOKEN * options.tokens]
    else:
        text = file_text(options.text, "--text", _MAX_TEXT_BYTES)
        name = f"{options.text}, SHA-256 {_digest(text)}"
    ids = loading.encode(loading.load_tokenizer(found), text, chat=False)[: options.tokens]
    if len(ids) < LEAST_TOKENS:
        raise InvalidParams(
            f"{name} has {len(ids)} tokens: at least {LEAST_TOKENS} are needed",
            hint="give a longer text; 512 tokens do",
            field="--text",
        )
    return _Read(name, ids)


def _topics() -> str:
    """Python's own help on its language, sorted: English and code that every installation has."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measured(session: Session, found: ModelSource, text: _Read, store: Calibrations) -> _Result:
    from veloxquant.ctl.records_progress import Progress
    from veloxquant.measure import loading, sensitivity

    model = loading.load_model(found)
    began = time.monotonic()
    with Progress(session.terminal, "calibrating", session.options.draws + 1) as progress:
        made = sensitivity.calibrate(found, model, text.ids, text.name, draws=session.options.draws, watch=progress.at)
    return _Result(made, time.monotonic() - began, store.put(made))


def _show(session: Session, result: _Result) -> None:
    made, terminal = result.calibration, session.terminal
    if terminal.json:
        terminal.value(SCHEMA, {"calibration": made, "seconds": round(result.seconds, 3), "path": str(result.path)})
        return
    from veloxquant.ctl.terminal import columns

    terminal.say(f"{made.model_id}: KL in nats a token with all of a layer's keys or values in so many bits")
    terminal.say()
    for line in columns(_table(made)):
        terminal.say(line)
    terminal.say()
    terminal.say(f"text      {made.tokens} tokens of {made.text}")
    terminal.say(f"took      {result.seconds:.1f} s")
    terminal.say(f"kept in   {result.path}")
    terminal.say("Plans of this model use it from now on: veloxquantctl plan, method adaptive.")


def _table(made: Calibration) -> list[tuple[str, ...]]:
    """Layers by what they cost at the least bits, the dearest first, then the sum of all."""
    ordered = sorted(made.layers, key=lambda layer: -sum(_sums(layer)))
    head = tuple(f"{what}{bits}" for what in "KV" for bits in made.bits)
    rows = [(str(layer.index), *map(_figure, _sums(layer))) for layer in ordered]
    total = tuple(_figure(sum(column)) for column in zip(*map(_sums, made.layers), strict=True))
    return [("LAYER", *head), *rows, ("all", *total)]


def _sums(layer: LayerSensitivity) -> list[float]:
    """Over heads: keys at each width, then values."""
    return [sum(column) for side in (layer.key, layer.value) for column in zip(*side, strict=True)]


def _figure(kl: Any) -> str:
    return f"{kl:.2g}"

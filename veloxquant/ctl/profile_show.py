"""A profile as text: each method's layers, then the methods side by side, then what each of them wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures
from veloxquant.ctl.terminal import columns
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.ctl.profile_result import Profile
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.measure.measurement import Run

_RIGHT = (1, 2, 3, 4, 5, 6, 7)
HEAD = ("METHOD", "RESIDENT", "OF FP16", "OF K+V", "PEAK", "MLX PEAK", "MS/TOKEN", "TOK/S", "TEXT")

_LEGEND = "OF FP16: of what fp16 held in this session. OF K+V: of all K and V given, in 16 bits. Speed: not profiled."


def show(result: Profile, terminal: Terminal, page: Path | None = None) -> None:
    """All of it."""
    from veloxquant.profiling import format_profile_table

    found = result.found
    terminal.say(terminal.paint("bold", about(result)))
    terminal.say(found.conditions.machine)
    for one in found.runs:
        terminal.say()
        terminal.say(terminal.paint("bold", title(one)))
        terminal.say(format_profile_table(one.report).rstrip("\n"))
    if found.runs:
        terminal.say()
        for line in columns([HEAD, *(row(result, one) for one in found.runs)], _RIGHT):
            terminal.say(line)
        terminal.say(terminal.paint("dim", _LEGEND))
    _texts(result, terminal)
    for failed in found.failures:
        said = terminal.cut(f"failed  {failed.label}: {failed.error}: {printable(failed.message)}")
        terminal.say(said.replace("failed", terminal.paint("red", "failed"), 1))
    for note in notes(result):
        terminal.note(note)
    for record in result.records:
        terminal.say(f"recorded  {record}")
    if page is not None and page.exists():
        terminal.say(f"page      {page}")


def about(result: Profile) -> str:
    """Model and lengths in one line."""
    size = "" if result.num_parameters is None else f", {result.num_parameters / 1e6:,.1f} M parameters"
    found = result.found
    lengths = f"{found.prompt_tokens:,} + {found.max_tokens:,} tokens"
    return f"{printable(result.model_id)}: {result.architecture}{size}; {lengths}"


def title(one: Run) -> str:
    """A method's name, and whether it is the plan's."""
    return f"{one.label}{' (planned)' if one.planned else ''}"


def row(result: Profile, one: Run) -> tuple[str, ...]:
    """One line of the comparison."""
    return (
        title(one),
        figures.size(one.resident_bytes),
        percent(result.found.reduction(one)),
        percent(one.resident_ratio),
        figures.size(one.peak_bytes),
        figures.size(one.mlx_peak_bytes),
        figures.UNKNOWN if one.ms_per_token is None else figures.short(one.ms_per_token),
        figures.UNKNOWN if one.decode_tok_s is None else figures.short(one.decode_tok_s),
        agreement(result, one),
    )


def percent(share: float | None) -> str:
    """A share of 1 in percent."""
    return figures.UNKNOWN if share is None else f"{100 * share:.1f}%"


def agreement(result: Profile, one: Run) -> str:
    """How far the text is that of the engine's own cache."""
    if one.label == ENGINE_OWN:
        return "the baseline"
    same, first = result.found.same_text(one), result.found.agreeing_tokens(one)
    if same is None:
        return figures.UNKNOWN
    return "same as fp16" if same else f"differs at token {(first or 0) + 1:,}"


def notes(result: Profile) -> list[str]:
    """What a reader of the figures must know."""
    found = result.found
    said = [
        f"{one.label} wrote another text when profiled: its caches do not give the same numbers twice"
        for one in found.runs
        if not one.same_when_profiled
    ]
    said += [
        f"{one.label} reports {one.reported_bytes:,} bytes and holds {one.resident_bytes:,}"
        for one in found.runs
        if one.reported_bytes not in (None, one.resident_bytes)
    ]
    if found.is_wide:
        said.append("this model computes in 32 bits: what fp16 held, and OF FP16 compares with, has 32 bits a number")
    if found.conditions.on_battery:
        said.append("this machine runs on battery, which may slow it")
    if any(one.ms_per_token is None for one in found.runs):
        said.append("only one token was generated: decoding has no speed")
    return said


def printable(text: str) -> str:
    """A text on one line that moves no cursor: what a model writes may hold anything."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _texts(result: Profile, terminal: Terminal) -> None:
    if not result.found.runs:
        return
    terminal.say()
    width = max(len(one.label) for one in result.found.runs)
    for one in result.found.runs:
        same = one.label != ENGINE_OWN and result.found.same_text(one)
        terminal.say(f"{one.label:<{width}}  {'(the same)' if same else printable(one.text)}")

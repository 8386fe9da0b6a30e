"""A profile as text: each method's layers, then the methods side by side, then what each of them wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures, profile_notes
from veloxquant.ctl.terminal import columns
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.ctl.profile_result import Profile
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.measure.measurement import Run

_RIGHT = (1, 2, 3, 4, 5, 6, 7)
HEAD = ("METHOD", "RESIDENT", "OF FP16", "OF K+V", "PEAK", "MLX PEAK", "MS/TOKEN", "TOK/S", "TEXT")

_LEGEND = (
    "OF FP16: of what fp16 held in the same comparison, its numbers as wide as they are.",
    "OF K+V: of all K and V given, in 16 bits. Speed: not profiled.",
)


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
        for line in _LEGEND:
            terminal.say(terminal.paint("dim", line))
    _texts(result, terminal)
    for failed in found.failures:
        said = terminal.cut(f"failed  {failed.label}: {failed.error}: {printable(failed.message)}")
        terminal.say(said.replace("failed", terminal.paint("red", "failed"), 1))
    if shared := matrices(result):
        terminal.say(f"TurboQuant's matrices: {shared}")
    for note in profile_notes.notes(result):
        terminal.note(note)
    for record in result.records:
        terminal.say(f"recorded  {record}")
    if page is not None and page.exists():
        terminal.say(f"page      {page}")


def about(result: Profile) -> str:
    """Model and lengths in one line."""
    size = "" if result.num_parameters is None else f", {result.num_parameters / 1e6:,.1f} M parameters"
    found = result.found
    written = found.max_tokens if found.generated_tokens is None else found.generated_tokens
    most = "" if written == found.max_tokens else f" (of at most {found.max_tokens:,}: fp16 ended its text)"
    lengths = f"{found.prompt_tokens:,} + {written:,} tokens{most}"
    return f"{printable(result.model_id)}: {result.architecture}{size}; {lengths}"


def title(one: Run) -> str:
    """A method's name, and whether it is the plan's."""
    return f"{one.label}{' (planned)' if one.planned else ''}"


def row(result: Profile, one: Run) -> tuple[str, ...]:
    """One line of the comparison."""
    return (
        title(one),
        figures.size(one.resident_bytes),
        percent(result.found.ratio_to_fp16_run(one)),
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


def matrices(result: Profile) -> str | None:
    """What the process holds beside all caches, None where there is nothing."""
    held = result.found.process_bytes
    return f"{figures.size(held)}, held once per process, whatever the layers; in no cache's bytes" if held else None


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

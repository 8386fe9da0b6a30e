"""A profile as one page: nothing is fetched, no script runs, what a model wrote is shown and never obeyed."""

from __future__ import annotations

import importlib.util
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant import __version__
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from veloxquant.ctl.profile_result import Profile
    from veloxquant.measure.measurement import Run

_FIELD = "--html"
_WHERE_THERE = ("TurboQuant's matrices", "Planned")
"""Facts that a page without them does not name."""
_LONGEST_PROMPT = 4000
"""Characters of the prompt that the page shows."""


def check(named: str) -> Path:
    """The absolute path of the page to write. Raises InvalidParams where it cannot be written, or drawn."""
    from veloxquant.benchmarks.storage import placed

    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidParams(
            f"--html needs {' and '.join(missing)}", hint="pip install 'veloxquant[report]'", field=_FIELD
        )
    if not named or "\0" in named:
        raise InvalidParams(f"--html names {named!r}, which is no path", hint="name a file", field=_FIELD)
    path = Path(os.path.realpath(placed(named)))  # what a link stands for is written, and the link stays
    try:
        wrong = _wrong(path)
    except OSError as error:  # a name longer than the system takes
        wrong = error.strerror or str(error)
    if wrong:
        raise InvalidParams(
            f"{named} cannot be written: {wrong}", hint="name a file in a folder of yours", field=_FIELD
        )
    return path


def write(result: Profile, path: Path) -> None:
    """Put the page at `path` at once: a reader sees the old file or the new one. Raises InvalidParams."""
    from veloxquant.benchmarks.storage import write_atomically

    try:
        write_atomically(path, page(result).encode())
    except OSError as error:
        why = error.strerror or error
        raise InvalidParams(f"{path} cannot be written: {why}", hint="choose another file", field=_FIELD) from None


def page(result: Profile) -> str:
    """The whole page as text."""
    import jinja2

    from veloxquant.ctl import profile_notes, profile_plots, profile_show

    template = resources.files(__package__).joinpath("profile_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    prompt = result.prompt
    return environment.from_string(template).render(
        about=profile_show.about(result),
        model=result.model_id,
        machine=result.found.conditions.machine,
        head=profile_show.HEAD,
        rows=[profile_show.row(result, one) for one in result.found.runs],
        failures=result.found.failures,
        notes=profile_notes.notes(result),
        plots=profile_plots.plots(result),
        methods=[_method(one) for one in result.found.runs],
        prompt=prompt[:_LONGEST_PROMPT],
        prompt_rest=max(0, len(prompt) - _LONGEST_PROMPT),
        facts=_facts(result),
        version=__version__,
    )


def _wrong(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is no file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else f"{path.parent} is not yours to write"


def _method(one: Run) -> dict[str, Any]:
    from veloxquant.ctl import figures, profile_show

    layers = [
        (
            str(layer.layer_id),
            f"{1000 * layer.quantize_ms_mean:,.1f} µs",
            f"{layer.n_quantize_calls:,}",
            figures.size(layer.resident_bytes),
            figures.size(layer.peak_resident_bytes),
            figures.size(layer.true_fp16_bytes),
        )
        for layer in one.report.layers
    ]
    return {"label": one.label, "title": profile_show.title(one), "text": one.text, "layers": layers}


def _facts(result: Profile) -> list[tuple[str, str]]:
    """Conditions in words; what is not known is said to be."""
    from veloxquant.ctl import figures, profile_show

    about = result.found.conditions
    first = next(iter(result.found.runs), None)
    facts = {
        "Measured at": about.at,
        "Machine": about.machine,
        "Memory": figures.size(about.total_memory_bytes),
        "System": f"{about.os_name or '?'} {about.os_version or ''}".strip(),
        "mlx-lm": about.mlx_lm_version,
        "Load average": None if about.load_average is None else f"{about.load_average:g}",
        "Sampling": f"temperature {about.temperature:g}",
        "Prompt in one call": None if first is None else f"{first.prefill_step_size:,} tokens",
        "TurboQuant's matrices": profile_show.matrices(result),
        "Planned": None if result.decision is None else f"{result.decision}: {result.planned or 'nothing'}",
        "Records": ", ".join(result.records) or "none written",
    }
    return [(name, value or "not known") for name, value in facts.items() if name not in _WHERE_THERE or value]

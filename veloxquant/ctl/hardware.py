"""The machine as plans see it, each fact with where it is from; or as if it were another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.ctl.arguments import count, number, size
from veloxquant.ctl.terminal import columns
from veloxquant.units import format_size

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.profiles import HardwareProfile

SCHEMA = "veloxquant.hardware/1"
_UNITS = {"bandwidth_gbps": "GB/s", "prefill_tflops": "TFLOPS"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides."""
    parser.add_argument("--chip", metavar="NAME", help="as if on this chip: 'Apple M4 Max'")
    parser.add_argument("--gpu-cores", metavar="N", type=count("--gpu-cores"), help="its GPU cores")
    parser.add_argument("--memory", metavar="SIZE", type=size("--memory"), help="total memory")
    parser.add_argument("--working-set", metavar="SIZE", type=size("--working-set"), help="what the GPU may hold")
    parser.add_argument("--bandwidth", metavar="GBPS", type=number("--bandwidth"), help="memory bandwidth in GB/s")


def run(session: Session) -> int:
    """Ask and show."""
    options = session.options
    overrides = {
        "chip": options.chip,
        "gpu_cores": options.gpu_cores,
        "total_memory_bytes": options.memory,
        "working_set_bytes": options.working_set,
        "bandwidth_gbps": options.bandwidth,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    found = session.client.hardware(given or None)
    session.say_where()
    if session.terminal.json:
        session.terminal.value(SCHEMA, found)
    else:
        show(found, session.terminal)
    return 0


def show(profile: HardwareProfile, terminal: Terminal) -> None:
    """Every field, its value with its unit, and its source; for what is unknown, the reason."""
    names = [name for name in profile.__struct_fields__ if name != "sources"]
    rows = [(name, _shown(name, getattr(profile, name)), profile.sources.get(name, "")) for name in names]
    for line in columns([(_words(name), value, source) for name, value, source in rows], (1,)):
        terminal.say(line)


def _words(name: str) -> str:
    for suffix in ("_bytes", "_gbps", "_tflops"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if name.endswith("_bytes"):
        return format_size(value)
    if isinstance(value, (int, float)):
        return f"{value:g} {_UNITS.get(name, '')}".rstrip()
    if isinstance(value, str):
        return value
    return ", ".join(f"{key} {share:.0%}" for key, share in value.items()) or "unknown"

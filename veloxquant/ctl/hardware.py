"""The machine as plans see it, each fact with where it is from; or as if it were another.

`--calibrate` measures memory bandwidth here first, so that a chip which no table lists gets speed figures too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from veloxquant.ctl.arguments import count, number, size
from veloxquant.ctl.terminal import columns
from veloxquant.errors import EngineUnavailable, InvalidParams, NotRunning, StoreUnavailable
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
    parser.add_argument(
        "--calibrate", action="store_true", help="measure memory bandwidth on this machine first, and keep the figure"
    )


def run(session: Session) -> int:
    """Measure if asked to; ask and show. Raises what `calibrate` does."""
    options = session.options
    overrides = {
        "chip": options.chip,
        "gpu_cores": options.gpu_cores,
        "total_memory_bytes": options.memory,
        "working_set_bytes": options.working_set,
        "bandwidth_gbps": options.bandwidth,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    if options.calibrate:
        if given:
            hint = "leave out what makes it another machine"
            raise InvalidParams("only this machine can be measured", hint=hint, field="--calibrate")
        calibrate(session)
    found = session.client.hardware(given or None)
    session.say_where()
    if options.calibrate and not found.sources.get("bandwidth_gbps", "").startswith("calibrated"):
        session.terminal.note("plans use the chip table's figure, since this chip has a published one")
    if session.terminal.json:
        session.terminal.value(SCHEMA, found)
    else:
        show(found, session.terminal)
    return 0


def calibrate(session: Session) -> None:
    """Measure memory bandwidth in this process, and have a running daemon look at the machine again.

    Raises EngineUnavailable without MLX or a chip name, StoreUnavailable when the figure cannot be kept.
    """
    from veloxquant.hardware import calibrate as calibration
    from veloxquant.hardware.detect import detect

    machine = detect()
    chip, version = machine.chip, machine.mlx_version
    if chip is None or version is None:
        unknown = "chip" if chip is None else "mlx_version"
        reason = f"the figure is kept by chip and MLX version, and {unknown} is unknown: {machine.sources[unknown]}"
        raise EngineUnavailable(reason, hint="`veloxquantctl doctor` checks the installation of MLX")
    made = calibration.measure(chip=chip, mlx_version=version)
    session.terminal.note(f"measured {made.bandwidth_gbps:g} GB/s on the {made.backend} backend")
    if calibration.stored(chip, version) != made:
        hint = "free some space, or set XDG_CACHE_HOME to a folder of yours"
        raise StoreUnavailable("the measured bandwidth could not be written to the cache folder", hint=hint)
    if not session.options.no_daemon:
        with suppress(NotRunning):
            session.client.reload()


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

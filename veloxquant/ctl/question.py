"""The flags of a question about a model, shared by plan, fit and explain, and the question they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.ctl.arguments import count, number, size
from veloxquant.errors import InvalidParams, ModelConfigInvalid, ModelNotFound

if TYPE_CHECKING:
    import argparse

OBJECTIVES = ("balanced", "memory", "latency", "throughput", "quality")
"""Those of profiles.workload, written again: importing them would load msgspec for `--help`."""
_MAX_CONFIG_BYTES = 8 * 2**20

_WORKLOAD = {
    "context": "context_length",
    "generate": "generation_length",
    "batch": "batch_size",
    "slots": "num_concurrent_requests",
    "objective": "objective",
    "max_kl": "max_kl",
    "max_latency": "max_latency_ms",
    "prefill_step": "prefill_step_size",
    "allow_eviction": "allow_eviction",
}
_HARDWARE = {
    "chip": "chip",
    "gpu_cores": "gpu_cores",
    "memory": "total_memory_bytes",
    "working_set": "working_set_bytes",
    "active": "active_bytes",
    "bandwidth": "bandwidth_gbps",
}


def add_question(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """Every flag of a question; `fit` asks for the context and does not take one."""
    _add_model(parser)
    _add_workload(parser, context=context)
    _add_hardware(parser)


def question(options: argparse.Namespace) -> dict[str, Any]:
    """What `Client.plan` and `Client.fit` take. Raises InvalidParams, ModelNotFound, ModelConfigInvalid."""
    asked: dict[str, Any] = {"model": _model(options)}
    asked |= {
        name: value
        for flag, name in _WORKLOAD.items()
        if (value := getattr(options, flag, None)) is not None and value is not False
    }
    hardware = {name: value for flag, name in _HARDWARE.items() if (value := getattr(options, flag)) is not None}
    if hardware:
        asked["hardware"] = hardware
    if options.engine_version is not None:
        asked["engine"] = {"name": "mlx-lm", "version": options.engine_version}
    if options.budget is not None:
        asked["memory_budget_bytes"] = options.budget
    if options.method:
        asked["methods"] = options.method
    return asked


def given_flags(options: argparse.Namespace) -> list[str]:
    """The flags of a question that were given."""
    names = ("model", "config", "weights", *_WORKLOAD, "budget", "method", *_HARDWARE, "engine_version", "records")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name, None) not in (None, False)]


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (one of --model and --config)")
    group.add_argument("--model", metavar="PATH|ID", help="a model folder, or an id of the local hub cache: org/name")
    group.add_argument("--config", metavar="FILE", help="a config.json without weights")
    group.add_argument("--weights", metavar="SIZE", type=size("--weights"), help="bytes of the weights of --config")


def _add_workload(parser: argparse.ArgumentParser, *, context: bool) -> None:
    group = parser.add_argument_group("workload")
    if context:
        group.add_argument("--context", metavar="N", type=count("--context"), help="prompt tokens: 8192, 32k, 128k")
    group.add_argument("--generate", metavar="N", type=count("--generate"), help="tokens generated (512)")
    group.add_argument("--batch", metavar="N", type=count("--batch"), help="sequences in one request (1)")
    group.add_argument("--slots", metavar="N", type=count("--slots"), help="requests served side by side (1)")
    group.add_argument("--objective", metavar="NAME", choices=OBJECTIVES, help=", ".join(OBJECTIVES))
    group.add_argument("--max-kl", metavar="X", type=number("--max-kl"), help="hard ceiling, nats a token")
    group.add_argument("--max-latency", metavar="MS", type=number("--max-latency"), help="ceiling, ms a token")
    group.add_argument("--budget", metavar="SIZE", type=size("--budget"), help="a cap for the caches alone")
    group.add_argument("--allow-eviction", action="store_true", help="consider variants that drop tokens")
    group.add_argument("--prefill-step", metavar="N", type=count("--prefill-step"), help="tokens in one call (2048)")
    group.add_argument("--method", metavar="NAME", nargs="+", action="extend", help="consider these methods only")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("as if on another machine")
    group.add_argument("--chip", metavar="NAME", help="as if on this chip: 'Apple M4 Max'")
    group.add_argument("--gpu-cores", metavar="N", type=count("--gpu-cores"), help="its GPU cores")
    group.add_argument("--memory", metavar="SIZE", type=size("--memory"), help="total memory")
    group.add_argument("--working-set", metavar="SIZE", type=size("--working-set"), help="what the GPU may hold")
    group.add_argument("--active", metavar="SIZE", type=size("--active"), help="what other work holds of it now")
    group.add_argument("--bandwidth", metavar="GBPS", type=number("--bandwidth"), help="memory bandwidth in GB/s")
    group.add_argument("--engine-version", metavar="V", help="the mlx-lm version that must be installed")
    group.add_argument("--records", metavar="DIR", help="plan in this process with the records of DIR")


def _model(options: argparse.Namespace) -> Any:
    if (options.model is None) == (options.config is None):
        given = "both" if options.model is not None else "neither"
        raise InvalidParams(
            f"a model is named by one of --model and --config, and {given} was given",
            hint="--model PATH, --model org/name, or --config FILE --weights SIZE",
            field="--model",
        )
    if options.model is not None:
        if options.weights is not None:
            raise InvalidParams(
                "--weights goes with --config only", hint="a model folder has its own", field="--weights"
            )
        return options.model
    model = {"config": _config(options.config), "model_id": _name(options.config)}
    return model if options.weights is None else {**model, "weights_bytes": options.weights}


def _name(file: str) -> str:
    """What to call a model that is only a config file: the file's name, or its folder's for a config.json."""
    from pathlib import Path

    path = Path(file).absolute()
    return (path.parent.name if path.stem == "config" else path.stem) or path.stem


def _config(file: str) -> dict[str, Any]:
    """The object in a config file."""
    import json

    hint = "give a config.json as published with the model"
    try:
        found = json.loads(_bytes_of(file))
    except OSError as error:
        message = f"the config file {file} cannot be read: {error.strerror or error}"
        raise ModelNotFound(message, hint=hint, field="--config") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or cut off by the limit
        raise ModelConfigInvalid(f"{file} is not JSON: {error}", hint=hint, field="--config") from None
    if not isinstance(found, dict):
        raise ModelConfigInvalid(f"{file} holds a {type(found).__name__}, no object", hint=hint, field="--config")
    return found


def _bytes_of(file: str) -> bytes:
    """What is in a plain file; a pipe would have us wait for whoever writes to it. Raises OSError, ModelNotFound."""
    from pathlib import Path

    from veloxquant import plain_file

    try:
        with plain_file.open_plain(Path(file)) as stream:
            return stream.read(_MAX_CONFIG_BYTES + 1)
    except plain_file.NotPlain:
        raise ModelNotFound(
            f"{file} is not a plain file", hint="save what it gives to a file, and name that", field="--config"
        ) from None

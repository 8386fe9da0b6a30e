"""Which methods are ready, with their variants, and which are quarantined and why; a check of what they build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.ctl.arguments import count
from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams
from veloxquant.units import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.wire.answers import MethodRow

SCHEMA = "veloxquant.methods/1"
_BY_LAYER = {
    "differ": "parameters differ from layer to layer; these are the first layer's",
    "calibration": "each layer's follow from a calibration (veloxquantctl sensitivity MODEL); these are the variant's",
}
_HEAD = ("NAME", "VARIANTS", "SOURCE", "STATE", "NOTE")


def arguments(parser: argparse.ArgumentParser) -> None:
    """All of them, or one."""
    actions = ("list", "show", "check")
    parser.add_argument("action", nargs="?", choices=actions, default="list", metavar="|".join(actions))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the method to show or to check; check takes all, too")
    parser.add_argument("--variant", dest="label", metavar="LABEL", help="the only variant to check")
    parser.add_argument("--architecture", metavar="NAME", help="the only tiny model to check on, such as llama")
    parser.add_argument(
        "--jobs", metavar="N", type=count("--jobs"), help="processes that check, at most one a core (1)"
    )


def run(session: Session) -> int:
    """List, show or check."""
    options = session.options
    if options.action == "check":
        from veloxquant.ctl import methods_check

        return methods_check.run(session)
    only = {"variant": options.label, "architecture": options.architecture, "jobs": options.jobs}
    for flag, given in only.items():
        if given is not None:
            raise InvalidParams(
                f"--{flag} is for check", hint=f"veloxquantctl methods check --{flag} ...", field=f"--{flag}"
            )
    if (options.action == "show") != (options.name is not None):
        raise InvalidParams(
            "show takes the name of a method, list takes none", hint="veloxquantctl methods show affine", field="name"
        )
    found = session.client.methods(options.name)
    session.say_where()
    if session.terminal.json:
        session.terminal.value(SCHEMA, found)
    elif options.action == "show":
        for row in found.methods:
            show(row, session.terminal)
    else:
        for line in columns([_HEAD, *(_row(row) for row in found.methods)], (1,)):
            session.terminal.say(line)
    return 0


def show(row: MethodRow, terminal: Terminal) -> None:
    """Everything known about one method."""
    terminal.say(terminal.paint("bold", f"{row.name}  {row.state}"))
    traits = (
        (row.batchable, "can be batched", "cannot be batched"),
        (row.trimmable, "can be trimmed", "cannot be trimmed"),
        (row.drops_tokens, "drops tokens", "drops no tokens"),
        (row.fused_attention, "makes no score matrix", "makes a score matrix"),
    )
    facts = {
        "summary": row.summary,
        "idea": row.idea,
        "keeps": row.keeps,
        "reason": row.reason,
        "source": row.source,
        "version": row.version,
        "paper": row.paper,
        "traits": ", ".join(yes if value else no for value, yes, no in traits if value is not None),
        "widths": _widths(row),
        "sample": _layer(sample) if (sample := _sample(row)) else "",
    }
    for name, value in facts.items():
        if value:
            terminal.say(_line(name, value))
    for parameter in row.parameters:
        terminal.say(_line("parameter", _parameter(parameter)))
    for variant in row.variants:
        params = ", ".join(f"{key} {value}" for key, value in variant["params"].items())
        terminal.say(_line("variant", f"{variant['label']}{f'  ({params})' if params else ''}"))
        for detail in _figures(variant, sample):
            terminal.say(_line("", f"  {detail}"))


def _line(name: str, value: str) -> str:
    return f"{name:<10} {value}"


def _widths(row: MethodRow) -> str:
    """Head widths that every variant takes, and those that only some do."""
    told = [frozenset(variant["widths"]) for variant in row.variants if "widths" in variant]
    if not told:
        return ""
    everywhere, anywhere = frozenset.intersection(*told), frozenset.union(*told)
    some = _listed(anywhere - everywhere)
    return "; ".join(filter(None, (_listed(everywhere), f"not every variant: {some}" if some else "")))


def _sample(row: MethodRow) -> Mapping[str, Any] | None:
    """The layer that figures are for, as long as nothing else is said."""
    return next((variant["sample"] for variant in row.variants if "sample" in variant), None)


def _layer(sample: Mapping[str, Any]) -> str:
    bits = 8 * sample["itemsize"]
    return f"figures are for a layer of {sample['heads']} KV heads of width {sample['width']} in {bits} bits"


def _listed(widths: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(widths)))


def _parameter(one: Mapping[str, Any]) -> str:
    """Name, default, what it takes, what it is."""
    if one["choices"]:
        taken = f"one of {', '.join(map(str, one['choices']))}"
    elif one["low"] is not None and one["high"] is not None:
        taken = f"{one['kind']} from {_bound(one['low'])} to {_bound(one['high'])}"
    elif one["low"] is not None or one["high"] is not None:
        bound = f"at least {_bound(one['low'])}" if one["low"] is not None else f"at most {_bound(one['high'])}"
        taken = f"{one['kind']}, {bound}"
    else:
        taken = one["kind"]
    default = "unset" if one["default"] is None else one["default"]
    said = f": {one['help']}" if one["help"] else ""
    return f"{one['name']} = {default}  ({taken}){said}"


def _bound(number: float) -> str:
    return f"{int(number):,}" if float(number).is_integer() else f"{number:g}"


def _figures(variant: Mapping[str, Any], sample: Mapping[str, Any] | None) -> Iterator[str]:
    """What a variant stores on the sample layer, and what its author says of its quality."""
    if "failed" in variant:
        yield f"cannot be told: {variant['failed']}"
        return
    if "sample" in variant:
        lengths = " and ".join(f"{bits:.4g} at {int(tokens):,} tokens" for tokens, bits in variant["bits_at"].items())
        bits = f"{variant['key_bits']:.4g} bits of K, {variant['value_bits']:.4g} of V"
        yield f"{bits}, {format_size(variant['fixed_bytes'])} fixed; in all {lengths}"
        if variant["sample"] != sample:
            yield _layer(variant["sample"])
        if variant["layers"] != "alike":
            yield _BY_LAYER[variant["layers"]]
    if "kl_mean" in variant:
        bounds = f"{variant['kl_low']:.3g} to {variant['kl_high']:.3g}"
        yield f"{variant['kl_mean']:.3g} nats ({bounds}): {variant['kl_source']}"


def _row(row: MethodRow) -> tuple[str, ...]:
    variants = f"{len(row.variants):,}" if row.variants else "-"
    return (row.name, variants, row.source or "-", row.state, row.reason or row.summary)

"""Which methods are ready: discovery, the probe, the fence and the rules for clashing names, in that order."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from veloxquant import paths
from veloxquant.errors import MethodNotFound, MethodRefused
from veloxquant.methods import verdicts
from veloxquant.methods.checks import check_parameters, check_variants
from veloxquant.methods.discovery import discover
from veloxquant.methods.fence import methods_of, quiet, reason_of
from veloxquant.methods.guard import Guarded
from veloxquant.methods.plugin import Plugin, Quarantined, canonical
from veloxquant.methods.probe import Limits, Verdict, examine
from veloxquant.methods.timed import within
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from veloxquant.methods.method import Method, Variant

_imported: dict[tuple[str, str, str], str | None] = {}
"""The files each foreign plugin had when this process first met it, by distribution, name and value: an upgrade
changes the version, and the code that was imported stays."""


@dataclass(frozen=True)
class Loaded:
    """The methods that are ready, in the order of their names, and the plugins that are not."""

    methods: tuple[Method, ...]
    variants: tuple[tuple[Method, Variant], ...]
    quarantined: tuple[Quarantined, ...]
    fingerprint: str
    sources: Mapping[str, Plugin] = field(default_factory=dict)
    """Method name -> the plugin it came from."""
    warnings: tuple[str, ...] = ()

    def method(self, name: str) -> Method:
        """The ready method of that name. Raises MethodNotFound, with the reason when it is quarantined."""
        for method in self.methods:
            if method.name == name:
                return method
        fenced = next((f": {q.name} is quarantined: {q.reason}" for q in self.quarantined if q.name == name), "")
        ready = ", ".join(method.name for method in self.methods) or "none"
        raise MethodNotFound(f"no method {name!r} is ready{fenced}", hint=f"ready: {ready}", field="method")

    def origin(self, name: str) -> str:
        """The distribution a loaded method came from, "" where that is not known."""
        plugin = self.sources.get(name)
        return "" if plugin is None else plugin.distribution

    def probes(self) -> list[dict[str, Any]]:
        """What a trace should try: every variant that packs layers, as plain values."""
        return [
            {"method": method.name, "label": variant.label, "params": dict(variant.params)}
            for method, variant in self.variants
            if method.name != ENGINE_OWN
        ]

    def tripped(self) -> tuple[Quarantined, ...]:
        """Methods that were ready and have failed in a call since."""
        return tuple(
            Quarantined(method.name, self.sources[method.name].distribution, method.tripped)
            for method in self.methods
            if isinstance(method, Guarded) and method.tripped is not None
        )


@dataclass(frozen=True)
class _Candidate:
    """A method that loaded, before names are compared."""

    plugin: Plugin
    method: Method
    variants: tuple[Variant, ...]
    stamp: str

    @property
    def claims(self) -> frozenset[str]:
        """Every name that records and plans may call it by."""
        return frozenset({self.method.name, *(variant.label for variant in self.variants)})


def load(
    *,
    only: Sequence[str] | None = None,
    import_timeout_s: float = 2.0,
    hook_timeout_s: float = 1.0,
    cache_dir: Path | None = None,
) -> Loaded:
    """Find, try out and load every plugin. Never raises for a bad one.

    `only` narrows to plugins of these entry-point names; without it VELOXQUANT_PLUGINS does (comma-separated).
    Plugins that are not ours are first loaded in a process of their own (`probe`), within the time limits in seconds,
    unless `cache_dir` remembers a verdict about these very files.
    """
    found, unreadable = discover()
    wanted, missing = _narrowed(found, only)
    limits = Limits(import_s=import_timeout_s, hook_s=hook_timeout_s, check_s=hook_timeout_s)
    folder = paths.cache_dir() / "methods" if cache_dir is None else cache_dir
    stamps, judged = _judged([plugin for plugin in wanted if not plugin.first_party], limits, folder)
    candidates: list[_Candidate] = []
    fenced = [*unreadable, *missing]
    stale = [_stale(plugin) for plugin, stamp in stamps.items() if _is_stale(plugin, stamp)]
    for plugin in wanted:
        verdict = judged.get(plugin, Verdict(ok=True))
        if not verdict.ok:
            fenced.append(Quarantined(plugin.name, plugin.distribution, verdict.reason))
            continue
        try:
            candidates += _candidates(plugin, stamps.get(plugin) or "", import_timeout_s + hook_timeout_s)
        except MethodRefused as error:
            fenced.append(Quarantined(plugin.name, plugin.distribution, error.message))
            verdicts.remember(folder, plugin, stamps.get(plugin), Verdict(ok=False, reason=error.message))
    ready, clashing, warnings = _without_clashes(candidates)
    return _loaded(ready, [*fenced, *clashing], [*stale, *warnings])


def _narrowed(found: Iterable[Plugin], only: Sequence[str] | None) -> tuple[list[Plugin], list[Quarantined]]:
    if only is None:
        listed = os.environ.get("VELOXQUANT_PLUGINS", "")
        only = [name.strip() for name in listed.split(",") if name.strip()] or None
    if only is None:
        return list(found), []
    wanted = [plugin for plugin in found if plugin.name in only]
    missing = sorted(set(only) - {plugin.name for plugin in wanted})
    return wanted, [Quarantined(name, "", "it was asked for and no installed plugin has this name") for name in missing]


def _judged(
    plugins: Sequence[Plugin], limits: Limits, folder: Path
) -> tuple[dict[Plugin, str | None], dict[Plugin, Verdict]]:
    """A stamp and a verdict for each foreign plugin, remembered or fresh."""
    stamps = {plugin: verdicts.stamp(plugin) for plugin in plugins}
    known = {plugin: verdicts.recall(folder, plugin, stamps[plugin]) for plugin in plugins}
    unknown = [plugin for plugin in plugins if known[plugin] is None]
    for plugin, verdict in zip(unknown, examine(unknown, limits), strict=True):
        known[plugin] = verdict
        verdicts.remember(folder, plugin, stamps[plugin], verdict)
    return stamps, {plugin: verdict for plugin, verdict in known.items() if verdict is not None}


def _is_stale(plugin: Plugin, stamp: str | None) -> bool:
    """Whether this process has imported other files than those on disk now; Python imports a module once."""
    try:
        imported = plugin.module in sys.modules
    except AttributeError:  # a value that names no module; the fence says so
        return False
    key = canonical(plugin.distribution), plugin.name, plugin.value
    first = _imported.setdefault(key, stamp) if imported else stamp
    _imported[key] = first
    return first != stamp


def _stale(plugin: Plugin) -> str:
    return f"{plugin.distribution}: its files changed since this process loaded it; restart to use them"


def _candidates(plugin: Plugin, stamp: str, limit_s: float) -> list[_Candidate]:
    """Load the plugin in this process. Raises MethodRefused for anything it does wrong.

    One of ours is trusted; any other has limit_s, since what its probe saw may have been long ago.
    """

    def load_it() -> list[_Candidate]:
        return [_candidate(plugin, method, stamp) for method in methods_of(plugin)]

    with quiet():
        return load_it() if plugin.first_party else within(limit_s, "loading it", load_it)


def _candidate(plugin: Plugin, method: Method, stamp: str) -> _Candidate:
    try:
        variants = check_variants(method)
        fenced = Guarded(method, variants, check_parameters(method), trusted=plugin.first_party)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise MethodRefused(f"its methods are not usable: {reason_of(error)}") from error
    return _Candidate(plugin, fenced, variants, stamp)


def _without_clashes(
    candidates: Sequence[_Candidate],
) -> tuple[list[_Candidate], list[Quarantined], list[str]]:
    """Foreign methods that share a name or label with any other are all out, whatever order they came in."""
    ready, clashing, warnings = list[_Candidate](), list[Quarantined](), list[str]()
    for candidate in candidates:
        rivals = [other for other in candidates if other is not candidate and other.claims & candidate.claims]
        if not rivals or candidate.plugin.first_party:
            ready.append(candidate)
            continue
        shared = min(name for other in rivals for name in other.claims & candidate.claims)
        whose = sorted({f"{other.plugin.name} of {other.plugin.distribution}" for other in rivals})
        reason = f"it offers {shared!r}, and so does {', '.join(whose)}: rename or uninstall one"
        clashing.append(Quarantined(candidate.method.name, candidate.plugin.distribution, reason))
        if any(other.plugin.first_party for other in rivals):
            warnings.append(f"{candidate.plugin.distribution}: {reason}; the built-in one is used")
    return ready, clashing, warnings


def _loaded(ready: Sequence[_Candidate], fenced: Sequence[Quarantined], warnings: Sequence[str]) -> Loaded:
    ordered = sorted(ready, key=lambda candidate: candidate.method.name)
    return Loaded(
        methods=tuple(candidate.method for candidate in ordered),
        variants=tuple((candidate.method, variant) for candidate in ordered for variant in candidate.variants),
        quarantined=tuple(sorted(fenced, key=lambda q: (q.name, q.distribution, q.reason))),
        fingerprint=_fingerprint(ordered),
        sources={candidate.method.name: candidate.plugin for candidate in ordered},
        warnings=tuple(sorted(warnings)),
    )


def _fingerprint(ordered: Sequence[_Candidate]) -> str:
    """What a stored trace depends on: names, versions, distributions, variants, and a foreign plugin's own files."""
    described = [
        [
            candidate.method.name,
            candidate.method.version,
            candidate.plugin.distribution,
            candidate.plugin.version,
            candidate.stamp,
            [[variant.label, sorted(variant.params.items())] for variant in candidate.variants],
        ]
        for candidate in ordered
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

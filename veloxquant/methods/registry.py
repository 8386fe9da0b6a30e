"""Which methods are ready: discovery, the probe, the fence and the rules for clashing names, in that order."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from veloxquant import paths
from veloxquant.errors import MethodNotFound, MethodRefused
from veloxquant.methods import suspects, verdicts
from veloxquant.methods.checks import check_parameters, check_variants
from veloxquant.methods.discovery import discover
from veloxquant.methods.fence import methods_of, quiet, reason_of
from veloxquant.methods.guard import Guarded
from veloxquant.methods.plugin import Plugin, Quarantined
from veloxquant.methods.plugin_files import PluginFiles, digest, look, site
from veloxquant.methods.probe import Limits, Verdict, examine
from veloxquant.methods.suspects import Calls
from veloxquant.methods.timed import within
from veloxquant.methods.upgrades import Imported, Running
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from veloxquant.methods.method import Method, Variant

    _Noted = Callable[[], AbstractContextManager[None]]

_imported = Imported()
_calls: dict[Path, Calls] = {}
_ENDED = "a process ended amid one of its calls; after ten minutes a reload or a new process tries it again"


@dataclass(frozen=True)
class Loaded:
    """The methods that are ready, in the order of their names, and the plugins that are not."""

    methods: tuple[Method, ...]
    variants: tuple[tuple[Method, Variant], ...]
    quarantined: tuple[Quarantined, ...]
    fingerprint: str
    sources: Mapping[str, Plugin] = field(default_factory=dict)
    """Method name -> the plugin it came from."""
    stamps: Mapping[str, str] = field(default_factory=dict)
    """Plugin.key of each plugin with a method here -> the stamp of its files, "" for ours and where it is unknown."""
    warnings: tuple[str, ...] = ()
    foreign: Mapping[Plugin, str | None] = field(default_factory=dict)
    """Every plugin that is not ours, quarantined or not, with the stamp its files had when it was loaded."""

    def look_again(self) -> str:
        """What stays the same until a plugin is installed, removed or changed on disk. Some file system calls."""
        return digest([site(), *((plugin.key, look(plugin).stamp) for plugin in self.foreign)])

    def changed(self) -> tuple[str, ...]:
        """What is on disk now and differs from what was loaded: each plugin as a phrase, in order."""
        wanted, _ = _narrowed(discover()[0], None)
        now = {plugin.key: plugin for plugin in wanted if not plugin.first_party}
        before = {plugin.key: plugin for plugin in self.foreign}
        phrases = [f"{plugin.label} is new" for key, plugin in now.items() if key not in before]
        phrases += [f"{plugin.label} is gone" for key, plugin in before.items() if key not in now]
        for key, plugin in now.items():
            old = before.get(key, plugin)
            if old != plugin:
                phrases.append(f"{old.label} became {plugin.version}")
            elif key in before and look(plugin).stamp != self.foreign[old]:
                phrases.append(f"files of {plugin.label} changed")
        return tuple(sorted(phrases))

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

    def facts(self) -> tuple[Any, ...]:
        """What tells two loads apart. A method that has failed in use is another one in the next: a new chance."""
        return self.fingerprint, self.quarantined, self.warnings, self.tripped(), self.foreign


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
    tried: Mapping[str, str] | None = None,
    import_timeout_s: float = 2.0,
    hook_timeout_s: float = 1.0,
    cache_dir: Path | None = None,
) -> Loaded:
    """Find, try out and load every plugin. Never raises for a bad one.

    `only` narrows to plugins of these entry-point names; without it VELOXQUANT_PLUGINS does (comma-separated).
    Plugins that are not ours and whose files only their user may write are first loaded in a process of their own
    (`probe`), within the time limits in seconds, unless `cache_dir` remembers a verdict about these very files.

    `tried` are `Loaded.stamps` of a process that has done all this: these plugins alone are loaded, each at once,
    unless its files have changed since.
    """
    found, unreadable = discover()
    wanted, missing = _narrowed(found, only)
    limits = Limits(import_s=import_timeout_s, hook_s=hook_timeout_s, check_s=hook_timeout_s)
    folder = paths.cache_dir() / "methods" if cache_dir is None else cache_dir
    files = {plugin: look(plugin) for plugin in wanted if not plugin.first_party}
    if tried is None:
        if files:
            _remember_accused(folder)
        judged = _judged(files, limits, folder)
    else:
        wanted = [plugin for plugin in wanted if plugin.key in tried]
        judged = {plugin: _same(seen.stamp, tried.get(plugin.key)) for plugin, seen in files.items()}
    running = [_running(plugin, files) for plugin in wanted]
    candidates: list[_Candidate] = []
    fenced = [*unreadable, *missing]
    for plugin, runs in zip(wanted, running, strict=True):
        verdict = judged.get(plugin, Verdict(ok=True))
        if not verdict.ok:
            fenced.append(Quarantined(plugin.name, plugin.distribution, verdict.reason))
            continue
        try:
            noted = _noted(folder, plugin, files) if tried is None else nullcontext
            candidates += _candidates(runs.plugin, runs.stamp or "", import_timeout_s + hook_timeout_s, noted)
        except MethodRefused as error:
            fenced.append(Quarantined(plugin.name, plugin.distribution, error.message))
            if plugin in files:
                verdicts.remember(folder, plugin, files[plugin].stamp, Verdict(ok=False, reason=error.message))
    ready, clashing, warnings = _without_clashes(candidates)
    stale = [runs.warning for runs in running if runs.warning is not None]
    loaded = _loaded(ready, [*fenced, *clashing], [*stale, *warnings])
    return replace(loaded, foreign={plugin: seen.stamp for plugin, seen in files.items()})


def load_again(before: Loaded) -> Loaded:
    """What `load` finds now; `before` itself where that is nothing else.

    What was worked out about methods is remembered by object: with new ones the first plans start from nothing.
    """
    now = load()
    return before if now.facts() == before.facts() else now


def _narrowed(found: Iterable[Plugin], only: Sequence[str] | None) -> tuple[list[Plugin], list[Quarantined]]:
    if only is None:
        listed = os.environ.get("VELOXQUANT_PLUGINS", "")
        only = [name.strip() for name in listed.split(",") if name.strip()] or None
    if only is None:
        return list(found), []
    wanted = [plugin for plugin in found if plugin.name in only]
    missing = sorted(set(only) - {plugin.name for plugin in wanted})
    return wanted, [Quarantined(name, "", "it was asked for and no installed plugin has this name") for name in missing]


def _judged(files: Mapping[Plugin, PluginFiles], limits: Limits, folder: Path) -> dict[Plugin, Verdict]:
    """A verdict for each foreign plugin, remembered or fresh. Files that others may write are not even imported."""
    judged = {p: Verdict(ok=False, reason=seen.exposed) for p, seen in files.items() if seen.exposed is not None}
    asked = {plugin: seen.stamp for plugin, seen in files.items() if plugin not in judged}
    known = {plugin: verdicts.recall(folder, plugin, stamp) for plugin, stamp in asked.items()}
    unknown = [plugin for plugin, verdict in known.items() if verdict is None]
    for plugin, verdict in zip(unknown, examine(unknown, limits), strict=True):
        known[plugin] = verdict
        verdicts.remember(folder, plugin, asked[plugin], verdict)
    return judged | {plugin: verdict for plugin, verdict in known.items() if verdict is not None}


def _same(stamp: str | None, tried: str | None) -> Verdict:
    if (stamp or "") == tried:
        return Verdict(ok=True)
    return Verdict(ok=False, reason="its files changed since the planner loaded it: veloxquantctl reload")


def _running(plugin: Plugin, files: Mapping[Plugin, PluginFiles]) -> Running:
    """Ours never change under a process that should use them: our own version comes with a restart."""
    return _imported.renew(plugin, files[plugin].stamp) if plugin in files else Running(plugin, None)


def _remember_accused(folder: Path) -> None:
    """What ended a process would end this one too."""
    for plugin, stamp in suspects.accused(_calls_folder(folder)):
        verdicts.remember(folder, plugin, stamp, Verdict(ok=False, reason=_ENDED))


def _calls_folder(folder: Path) -> Path:
    """Beside the verdicts."""
    return folder.with_name(f"{folder.name}-calls")


def _noted(folder: Path, plugin: Plugin, files: Mapping[Plugin, PluginFiles]) -> _Noted:
    """What surrounds a call of the plugin: nothing for ours, and where its files cannot be told from later ones."""
    stamp = files[plugin].stamp if plugin in files else None
    if stamp is None:
        return nullcontext
    return partial(_calls.setdefault(folder, Calls(_calls_folder(folder))).under_way, plugin, stamp)


def _candidates(plugin: Plugin, stamp: str, limit_s: float, noted: _Noted) -> list[_Candidate]:
    """Load the plugin in this process. Raises MethodRefused for anything it does wrong.

    One of ours is trusted; any other has limit_s, since what its probe saw may have been long ago.
    """

    def load_it() -> list[_Candidate]:
        return [_candidate(plugin, method, stamp, noted) for method in methods_of(plugin)]

    with quiet(), noted():
        return load_it() if plugin.first_party else within(limit_s, "loading it", load_it)


def _candidate(plugin: Plugin, method: Method, stamp: str, noted: _Noted) -> _Candidate:
    try:
        variants = check_variants(method)
        fenced = Guarded(method, variants, check_parameters(method), trusted=plugin.first_party, noted=noted)
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
    claimed: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        for name in candidate.claims:
            claimed.setdefault(name, []).append(candidate)
    for candidate in candidates:
        others = {id(other): other for name in candidate.claims for other in claimed[name] if other is not candidate}
        rivals = [*others.values()]
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
        stamps={candidate.plugin.key: candidate.stamp for candidate in ordered},
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

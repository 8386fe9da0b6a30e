"""Loading: names that clash, names that are asked for, verdicts that are remembered, metadata that is damaged."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from reliability.plugins import lay_out, sound

from veloxquant.errors import MethodNotFound
from veloxquant.methods import probe, registry, verdicts
from veloxquant.methods.checks import sample_part
from veloxquant.methods.plugin import Plugin
from veloxquant.methods.upgrades import Imported

if TYPE_CHECKING:
    from pathlib import Path

OURS = [
    "adaptive",
    "affine",
    "fp16",
    "h2o",
    "kivi",
    "knorm",
    "pyramidkv",
    "rotated",
    "rotated_token",
    "snapkv",
    "streaming",
    "turboquant_mse",
    "turboquant_prod",
]
"""The methods that ship, in the order of their names."""


@pytest.fixture
def install(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lays out a distribution of one method of one label, in the folder it gives back.

    Its module begins and ends with what is asked for besides.
    """
    site = short_folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    written: list[str] = []

    def install(dist: str, name: str, label: str, *, entry: str = "", begin: str = "", end: str = "") -> Path:
        source = begin + sound(name, {label: 8}) + end
        written.append(lay_out(site, dist, source, module=f"vqreg_{dist}", entry=entry).stem)
        return site

    yield install
    for module in written:
        sys.modules.pop(module, None)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many plugins each load had to try out."""
    counts: list[int] = []

    def counting(plugins: Any, limits: Any) -> Any:
        counts.append(len(plugins))
        return probe.examine(plugins, limits)

    monkeypatch.setattr(registry, "examine", counting)
    return counts


def names(loaded: registry.Loaded) -> list[str]:
    """Of the ready methods."""
    return [method.name for method in loaded.methods]


def test_ours_come_through_the_same_door() -> None:
    """All are found by entry point, and every variant but fp16 needs a trace."""
    loaded = registry.load()
    assert names(loaded) == OURS
    assert loaded.quarantined == ()
    assert {probe["method"] for probe in loaded.probes()} == set(OURS) - {"fp16"}
    assert len(loaded.probes()) == len(loaded.variants) - 1
    assert len(loaded.variants) <= 64, "each is tried in every trace, and sized in every plan"
    assert {"method": "affine", "label": "affine8-g32", "params": {"bits": 8, "group": 32}} in loaded.probes()


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_r29_two_foreign_plugins_of_one_method_name_are_both_out(install: Any, order: tuple[str, str]) -> None:
    """Neither the order of installation nor of names decides."""
    for dist in order:
        install(dist, "twin", "twin-a" if dist == "first" else "twin-b")
    loaded = registry.load()
    assert names(loaded) == OURS
    assert [(q.name, q.distribution) for q in loaded.quarantined] == [("twin", "first"), ("twin", "second")]
    assert "it offers 'twin', and so does second of second" in loaded.quarantined[0].reason


def test_r29_a_label_is_a_name_too(install: Any) -> None:
    """Records and plans call variants by label: a foreign label may be nobody's label or method name."""
    install("stealing", "mine", "affine4-g64")
    install("calling", "other", "fp16")
    loaded = registry.load()
    assert names(loaded) == OURS
    assert [q.name for q in loaded.quarantined] == ["mine", "other"]
    assert len(loaded.warnings) == 2


def test_unlike_foreign_plugins_are_all_ready(install: Any) -> None:
    """And each method knows where it came from."""
    install("first", "one", "one-a")
    install("second", "two", "two-a")
    loaded = registry.load()
    assert names(loaded) == sorted([*OURS, "one", "two"])
    assert loaded.sources["two"].distribution == "second"


def test_environment_and_argument_narrow_what_loads(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VELOXQUANT_PLUGINS and `only` name entry points; one that is not installed is reported."""
    install("first", "one", "one-a", entry="uno")
    assert names(registry.load(only=["fp16", "uno"])) == ["fp16", "one"]
    monkeypatch.setenv("VELOXQUANT_PLUGINS", " fp16, nonesuch ,")
    loaded = registry.load()
    assert names(loaded) == ["fp16"]
    assert [(q.name, q.reason) for q in loaded.quarantined] == [
        ("nonesuch", "it was asked for and no installed plugin has this name")
    ]
    monkeypatch.setenv("VELOXQUANT_PLUGINS", "")
    assert names(registry.load()) == sorted([*OURS, "one"])


def test_hook_calls_are_traced_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """VELOXQUANT_TRACE_HOOKS=1 writes each call to standard error, and nothing to standard output."""
    monkeypatch.setenv("VELOXQUANT_TRACE_HOOKS", "1")
    registry.load()
    out, err = capsys.readouterr()
    assert out == ""
    assert "fp16:" in err
    assert "veloxquant_methods" in err


def test_what_a_plugin_prints_stays_off_our_standard_output(install: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output carries answers."""
    install("chatty", "one", "one-a", begin="print('hello')\n")
    assert "one" in names(registry.load())
    assert capfd.readouterr().out == ""


def test_a_plugin_is_tried_out_once_until_its_files_change(install: Any, probes: list[int]) -> None:
    """A good verdict is kept on disk and forgotten when a file of the plugin changes."""
    site = install("first", "one", "one-a")
    registry.load()
    registry.load()
    module = site / "vqreg_first.py"
    module.write_text(module.read_text() + "\n# changed\n")
    registry.load()
    assert probes == [1, 0, 1]


def test_a_bad_verdict_is_remembered_for_a_while_and_not_after_an_installation(
    install: Any, probes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang is not paid for at every load; a missing package may arrive, and ten minutes are enough."""
    site = install("lacking", "one", "one-a", begin="import vqreg_absent\n")
    assert names(registry.load()) == OURS
    registry.load()
    assert probes == [1, 0]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + verdicts.BAD_FOR_S + 1)
    registry.load()
    monkeypatch.setattr(time, "time", lambda: now)
    assert probes == [1, 0, 1]
    (site / "vqreg_absent.py").write_text("")
    os.utime(site, ns=(1, 1))  # some file systems have coarse times
    assert "one" in names(registry.load())
    assert probes == [1, 0, 1, 1]


@pytest.mark.parametrize(("dist", "hang"), [("sleeping", "time.sleep(30)"), ("looping", "while True: pass")])
def test_a_plugin_that_hangs_after_a_good_verdict_holds_nobody_up(
    install: Any, short_folder: Path, probes: list[int], dist: str, hang: str
) -> None:
    """Its files did not change, but what it does depends on more: it is left, and not tried again for a while."""
    trap = short_folder / "trap"
    body = f"import os, time\nif os.path.exists({str(trap)!r}):\n    {hang}\n"
    install(dist, "one", "one-a", begin=body)
    install("second", "two", "two-a")
    assert names(registry.load()) == sorted([*OURS, "one", "two"])
    sys.modules.pop(f"vqreg_{dist}")  # as in a new process
    trap.write_text("")
    loaded = registry.load(import_timeout_s=0.3, hook_timeout_s=0.2)
    assert names(loaded) == sorted([*OURS, "two"])
    assert [(q.name, q.reason) for q in loaded.quarantined] == [(dist, "loading it took longer than 0.5 s")]
    assert registry.load().quarantined == loaded.quarantined
    assert probes == [2, 0, 0]


def test_what_a_plugin_does_to_warnings_stays_with_it(install: Any) -> None:
    """Many packages add filters when they are imported; ours are as before."""
    install("filtering", "one", "one-a", begin="import warnings\nwarnings.simplefilter('ignore')\n")
    before = list(warnings.filters)
    assert "one" in names(registry.load())
    assert list(warnings.filters) == before


def test_a_full_disk_leaves_no_half_verdicts(install: Any, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write fails as it does on a full disk; the plugin loads and no file is left."""
    install("first", "one", "one-a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verdicts.json, "dump", full)
    assert "one" in names(registry.load(cache_dir=short_folder / "verdicts"))
    assert list((short_folder / "verdicts").iterdir()) == []


def test_two_processes_load_at_once(install: Any, short_folder: Path) -> None:
    """Two daemons that start together try out the same plugins and keep the same verdicts."""
    for dist, name in (("first", "one"), ("second", "two")):
        install(dist, name, f"{name}-a")
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(verdict_files, short_folder / "verdicts") for _ in range(4)]
    assert [future.result() for future in made] == [2] * 4


def verdict_files(folder: Path) -> int:
    """Load in a process of its own, and count the whole verdicts then there."""
    code = (
        "import json, pathlib, sys; sys.path[:] = json.loads(sys.argv[1])\n"
        "from veloxquant.methods import registry\n"
        "folder = pathlib.Path(sys.argv[2])\n"
        "print(*[m.name for m in registry.load(cache_dir=folder).methods])\n"
        "print(sum(json.loads(path.read_text())['ok'] for path in folder.glob('*.json')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path), str(folder)], capture_output=True, text=True, check=True
    )
    *ready, whole = done.stdout.split()
    assert ready == sorted([*OURS, "one", "two"])
    return int(whole)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"stamp": null}', "\x00", '{"ok": 1, "reason": 2}'])
def test_a_damaged_verdict_is_no_verdict(install: Any, probes: list[int], short_folder: Path, damage: str) -> None:
    """A torn or foreign file costs one probe."""
    install("first", "one", "one-a")
    folder = short_folder / "verdicts"
    registry.load(cache_dir=folder)
    (file,) = folder.iterdir()
    file.write_text(damage)
    assert "one" in names(registry.load(cache_dir=folder))
    assert probes == [1, 1]
    json.loads(file.read_text())


def test_a_plugins_name_leads_nowhere(install: Any, short_folder: Path) -> None:
    """What is kept of it lies in our folder under a name of our own, whatever it calls itself."""
    install("first", "one", "one-a", entry="../../../evil")
    folder = short_folder / "a" / "b" / "verdicts"
    before = {path for path in short_folder.rglob("*") if "__pycache__" not in path.parts}
    assert "one" in names(registry.load(cache_dir=folder))
    made = set(short_folder.rglob("*.json")) - before
    assert [path.parent for path in made] == [folder]
    assert made.pop().stem.isalnum()


def test_a_verdict_that_others_may_write_is_no_verdict(install: Any, probes: list[int], short_folder: Path) -> None:
    """They would decide what runs here."""
    install("first", "one", "one-a")
    folder = short_folder / "verdicts"
    registry.load(cache_dir=folder)
    (file,) = folder.iterdir()
    file.chmod(0o666)
    assert "one" in names(registry.load(cache_dir=folder))
    assert probes == [1, 1]


def test_without_a_disk_every_load_tries_out(install: Any, probes: list[int], short_folder: Path) -> None:
    """A cache folder that cannot be made costs time and nothing else."""
    install("first", "one", "one-a")
    blocked = short_folder / "file"
    blocked.write_text("")
    for _ in range(2):
        assert "one" in names(registry.load(cache_dir=blocked / "methods"))
    assert probes == [1, 1]


def test_damaged_metadata_of_one_distribution_hides_no_other(install: Any) -> None:
    """Entry points that do not parse, and metadata without a name."""
    site = install("first", "one", "one-a")
    for broken, metadata, points in (
        ("torn", "Name: torn\nVersion: 1\n", "[veloxquant.methods]\n= = [\nno value\n"),
        ("nameless", "", "[veloxquant.methods]\nx = y\n"),
        ("binary", "Name: binary\nVersion: 1\n", None),
    ):
        info = site / f"{broken}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_bytes(
            b"[veloxquant.methods]\n\xff\xfe" if points is None else points.encode()
        )
    loaded = registry.load()
    assert names(loaded) == sorted([*OURS, "one"])
    assert len(loaded.quarantined) == 3


def test_an_unready_method_says_why(install: Any) -> None:
    """Asked by name, a quarantined method answers with its reason and what is ready."""
    install("first", "twin", "twin-a")
    install("second", "twin", "twin-b")
    loaded = registry.load()
    assert loaded.method("fp16").name == "fp16"
    with pytest.raises(MethodNotFound, match="twin is quarantined: it offers 'twin'") as caught:
        loaded.method("twin")
    assert caught.value.hint == f"ready: {', '.join(OURS)}"


def test_a_method_that_fails_later_is_listed(install: Any) -> None:
    """The registry knows which of its methods have been fenced off since."""
    late = "Mine.key_bits = lambda self, variant, part: 8.0 if part.key_width != 72 else 1 / 0\n"
    install("first", "one", "one-a", end=late)
    loaded = registry.load()
    assert loaded.tripped() == ()
    method = loaded.method("one")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        method.key_bits(method.variants()[0], sample_part(72, 2))
    assert [(q.name, q.distribution) for q in loaded.tripped()] == [("one", "first")]


def test_methods_stay_the_same_objects_until_a_load_finds_another_thing(install: Any) -> None:
    """What is remembered of a method goes with it; one that has failed is made anew, for a new chance."""
    late = "Mine.key_bits = lambda self, variant, part: 8.0 if part.key_width != 72 else 1 / 0\n"
    site = install("first", "one", "one-a", end=late)
    before = registry.load()
    assert registry.load_again(before) is before
    method = before.method("one")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        method.key_bits(method.variants()[0], sample_part(72, 2))
    mended = registry.load_again(before)
    assert (mended.tripped(), len(before.tripped())) == ((), 1)
    assert registry.load_again(mended) is mended
    upgrade(site, "1.1", "Mine.key_bits = lambda self, variant, part: 4.0")
    newer = registry.load_again(mended)
    assert newer.sources["one"].version == "1.1"
    assert registry.load_again(newer) is newer


def upgrade(site: Path, version: str, *lines: str) -> None:
    """Lay out what pip leaves after an upgrade of the distribution `first`, with lines added to its module."""
    source = "\n".join([(site / "vqreg_first.py").read_text(), *lines, "# another version\n"])
    lay_out(site, "first", source, version, module="vqreg_first")


def test_an_upgraded_plugin_answers_from_its_new_version_after_the_next_load(install: Any) -> None:
    """No stale module stays: its figures, its version and its fingerprint are those of the files on disk."""
    site = install("first", "one", "one-a")
    before = registry.load()
    upgrade(site, "1.1", "Mine.key_bits = lambda self, variant, part: 4.0")
    loaded = registry.load()
    method = loaded.method("one")
    assert method.key_bits(method.variants()[0], sample_part(64, 2)) == 4.0
    assert (loaded.sources["one"].version, loaded.warnings) == ("1.1", ())
    assert before.fingerprint != loaded.fingerprint == registry.load().fingerprint
    assert before.method("one").key_bits(method.variants()[0], sample_part(64, 2)) == 8.0


def test_a_plugin_with_compiled_parts_needs_a_restart_and_says_so(install: Any) -> None:
    """It goes on as the version it is, under that version's name."""
    site = install("first", "one", "one-a", begin="__file__ = __file__.replace('.py', '.abi3.so')\n")
    before = registry.load()
    upgrade(site, "1.1", "Mine.key_bits = lambda self, variant, part: 4.0")
    loaded = registry.load()
    method = loaded.method("one")
    assert method.key_bits(method.variants()[0], sample_part(64, 2)) == 8.0
    assert loaded.warnings == ("first: this process runs 1.0; restart to use first 1.1",)
    assert loaded.sources["one"].version == "1.0"
    assert loaded.fingerprint == before.fingerprint


@pytest.mark.parametrize("module", ["veloxquant.units", "json.tool", "msgspec.structs"])
def test_what_the_process_runs_on_is_never_taken_out_of_memory(module: str) -> None:
    """An entry point may name anybody's module; one that changed on disk is still in use by all others."""
    importlib.import_module(module)
    before = dict(sys.modules)
    imported = Imported()
    plugin = Plugin("stranger", "odd", module, "1.0")
    assert imported.renew(plugin, "stamp").warning is None
    upgraded = Plugin("stranger", "odd", module, "1.1")
    assert imported.renew(upgraded, "another").warning == (
        "stranger: this process runs 1.0; restart to use stranger 1.1"
    )
    assert before.items() <= sys.modules.items()


def test_two_plugins_of_one_package_are_renewed_together(install: Any) -> None:
    """They share classes before an upgrade and after it, since all are forgotten before any is imported."""
    install("second", "two", "two-a")
    site = install("first", "one", "one-a", end="import vqreg_second\nMine.base = vqreg_second.Mine\n")
    points = "[veloxquant.methods]\none = vqreg_first\ntwo = vqreg_second\n"
    (site / "first-1.0.dist-info" / "entry_points.txt").write_text(points)
    (site / "second-1.0.dist-info" / "entry_points.txt").write_text("")
    registry.load()
    for name in ("first", "second"):
        (site / f"vqreg_{name}.py").write_text((site / f"vqreg_{name}.py").read_text() + "# changed\n")
    loaded = registry.load()
    assert names(loaded) == sorted([*OURS, "one", "two"])
    assert sys.modules["vqreg_first"].Mine.base is sys.modules["vqreg_second"].Mine


def test_a_look_again_tells_an_installation_and_a_changed_file_from_nothing(install: Any) -> None:
    """What the daemon asks now and then, without loading anything."""
    site = install("first", "one", "one-a")
    loaded = registry.load()
    quiet = loaded.look_again()
    assert loaded.look_again() == quiet
    module = site / "vqreg_first.py"
    module.write_text(module.read_text() + "# changed\n")
    changed = loaded.look_again()
    assert changed != quiet
    install("second", "two", "two-a")
    os.utime(site, ns=(1, 1))  # some file systems have coarse times
    assert loaded.look_again() not in (quiet, changed)


def test_what_is_other_on_disk_than_in_memory_is_told_by_plugin(install: Any) -> None:
    """New, gone, upgraded or written to, each in its words; nothing of what is as it was, nor of ours."""
    site = install("first", "one", "one-a")
    for dist, name in (("second", "two"), ("third", "three"), ("fourth", "four")):
        install(dist, name, f"{name}-a")
    loaded = registry.load()
    assert loaded.changed() == ()
    upgrade(site, "1.1", "")
    (site / "vqreg_second.py").write_text((site / "vqreg_second.py").read_text() + "# changed\n")
    shutil.rmtree(site / "third-1.0.dist-info")
    install("fifth", "five", "five-a")
    assert loaded.changed() == (
        "fifth 1.0 is new",
        "files of second 1.0 changed",
        "first 1.0 became 1.1",
        "third 1.0 is gone",
    )


def test_what_was_tried_elsewhere_is_loaded_as_it_was_and_nothing_else(install: Any, probes: list[int]) -> None:
    """A trace loads what its planner has loaded, from the same files, or not at all."""
    site = install("first", "one", "one-a")
    install("second", "two", "two-a")
    stamps = dict(registry.load().stamps)
    stamps.pop("second:second=vqreg_second")
    assert names(registry.load(tried=stamps)) == sorted([*OURS, "one"])
    assert len(probes) == 1
    module = site / "vqreg_first.py"
    module.write_text(module.read_text() + "# changed\n")
    loaded = registry.load(tried=stamps)
    assert names(loaded) == OURS
    assert [(q.name, q.reason) for q in loaded.quarantined] == [
        ("first", "its files changed since the planner loaded it: veloxquantctl reload")
    ]


@pytest.mark.parametrize("what", ["vqreg_first.py", "first-1.0.dist-info", "."])
def test_a_plugin_that_others_may_write_is_not_even_imported(install: Any, probes: list[int], what: str) -> None:
    """Its module, the folder that announces it, or the folder they lie in: with the command that mends it."""
    site = install("first", "one", "one-a", begin="raise SystemExit\n")
    (site / what).chmod(0o777)
    loaded = registry.load()
    assert names(loaded) == OURS
    (fenced,) = loaded.quarantined
    assert fenced.name == "first"
    assert fenced.reason == (
        f"it can be written by others: {site / what} is open to everybody: chmod go-w '{site / what}'"
    )
    assert probes == [0]


def test_a_plugins_inner_file_that_others_may_write_is_found(install: Any, short_folder: Path) -> None:
    """Each file of its package counts, not the one of its entry point alone."""
    site = install("first", "one", "one-a")
    package = site / "vqreg_first"
    package.mkdir()
    (site / "vqreg_first.py").rename(package / "__init__.py")
    inner = package / "data.json"
    inner.write_text("{}")
    assert "one" in names(registry.load())
    inner.chmod(0o666)
    (fenced,) = registry.load().quarantined
    assert fenced.reason.startswith(f"it can be written by others: {inner} is open to everybody")


@pytest.mark.parametrize("value", ["", "not a module", ":", "a:b:c", "..", "os:", "os.path:join"])
def test_an_entry_point_that_names_no_plugin_is_quarantined(install: Any, value: str) -> None:
    """Whatever is written there, the others load."""
    site = install("first", "one", "one-a")
    points = site / "first-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[veloxquant.methods]\nodd = {value}\n")
    loaded = registry.load()
    assert names(loaded) == OURS
    assert [q.distribution for q in loaded.quarantined] in (["first"], [str(site / "first-1.0.dist-info")])


def test_the_fingerprint_follows_what_a_trace_depends_on(install: Any) -> None:
    """Another set of methods, another label, another source: another fingerprint; nothing changed: the same."""
    bare = registry.load().fingerprint
    site = install("first", "one", "one-a")
    first = registry.load().fingerprint
    assert registry.load().fingerprint == first != bare
    module = site / "vqreg_first.py"
    module.write_text(module.read_text() + "\n# build() changed\n")
    assert registry.load().fingerprint not in (first, bare)

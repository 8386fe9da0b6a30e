"""One good distribution and six broken ones, installed with pip side by side, and the registry that meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.errors import MethodRefused
from veloxquant.methods import registry
from veloxquant.methods.fence import methods_of
from veloxquant.methods.plugin import Plugin

if TYPE_CHECKING:
    from pathlib import Path

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from veloxquant.methods import registry, worker
loaded = registry.load()
print(json.dumps({
    "methods": [m.name for m in loaded.methods],
    "labels": [v.label for _, v in loaded.variants],
    "quarantined": {q.name: [q.distribution, q.reason] for q in loaded.quarantined},
    "fingerprint": loaded.fingerprint,
    "warnings": loaded.warnings,
    "source": [loaded.sources["halved"].distribution, loaded.sources["halved"].version],
    "probes": sorted({p["method"] for p in loaded.probes()}),
    "engine": [m for m in ("mlx", "mlx_lm", "torch") if m in sys.modules],
    "built": type(worker.Factory(loaded).build("halved", "halved8", {"bits": 8}, 0, None)).__name__,
}))
"""


def ask(installed: Path, home: Path, hash_seed: str) -> dict[str, Any]:
    """The registry's answer in a fresh process with the installed distributions on its path."""
    folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(installed)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **folders, "PYTHONHASHSEED": hash_seed},
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def answer(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All seven together."""
    return ask(installed, tmp_path_factory.mktemp("home"), "1")


def test_good_methods_stay_and_six_broken_plugins_are_quarantined(answer: dict[str, Any]) -> None:
    """The third-party method and all of ours are ready, whatever is installed beside them."""
    alone = registry.load()
    assert answer["methods"] == sorted([*(method.name for method in alone.methods), "halved"])
    assert sorted(answer["labels"]) == sorted([*(variant.label for _, variant in alone.variants), "halved8"])
    assert len(answer["quarantined"]) == 6


@pytest.mark.parametrize(
    ("name", "distribution", "reason"),
    [
        ("import_error", "vqtest-import-error", "import failed: ModuleNotFoundError: No module named 'a_package_that"),
        ("raising", "vqtest-raising", "hook failed: RuntimeError: the hook of a broken plugin"),
        ("hang", "vqtest-hang", "importing it took longer than 2 s"),
        ("wrong_type", "vqtest-wrong-type", "the hook returned an object of type str among its methods"),
        ("affine", "vqtest-duplicate", "it offers 'affine', and so does affine of veloxquant"),
        ("exit", "vqtest-exit", "import failed: it called sys.exit(3)"),
    ],
)
def test_each_broken_plugin_has_its_reason(answer: dict[str, Any], name: str, distribution: str, reason: str) -> None:
    """Name, distribution and what is wrong, in words."""
    assert answer["quarantined"][name][0] == distribution
    assert reason in answer["quarantined"][name][1]


def test_the_built_in_method_wins_over_its_namesake_with_a_warning(answer: dict[str, Any]) -> None:
    """The name is ours, and the user is told of the other."""
    assert answer["labels"].count("affine4-g64") == 1
    (warning,) = answer["warnings"]
    assert warning.startswith("vqtest-duplicate: it offers 'affine', and so does affine of veloxquant")
    assert warning.endswith("the built-in one is used")


def test_the_third_party_method_is_planned_traced_and_built_like_ours(answer: dict[str, Any]) -> None:
    """It comes with its distribution, is among the probes of a trace, and builds its cache."""
    assert answer["source"] == ["vqtest-good", "0.3"]
    ours = {probe["method"] for probe in registry.load().probes()}
    assert answer["probes"] == sorted({*ours, "halved"})
    assert answer["built"] == "KVCache"


def test_loading_carries_no_engine(answer: dict[str, Any]) -> None:
    """The daemon loads plugins and must not grow by mlx_lm."""
    assert answer["engine"] == []


def test_the_fingerprint_is_the_same_in_every_process(
    answer: dict[str, Any], installed: Path, short_folder: Path
) -> None:
    """Another hash seed, another process, another home: the same methods, the same fingerprint."""
    assert ask(installed, short_folder, "2")["fingerprint"] == answer["fingerprint"]


def test_an_entry_point_that_names_no_module_says_so() -> None:
    """Not in the words of whatever parses it."""
    with pytest.raises(MethodRefused) as refused:
        methods_of(Plugin("dist", "name", "../../etc/passwd"))
    assert refused.value.message == "import failed: its entry point '../../etc/passwd' is no module or module:attribute"

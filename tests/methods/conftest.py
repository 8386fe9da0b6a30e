"""Third-party plugins: distributions that pip really installs, and single modules for what only a probe must see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from veloxquant.methods import Method, QualityPrior, Variant
from veloxquant.methods.plugin import Plugin

DISTS = Path(__file__).parent / "dists"


class Simple(Method):
    """A method that is right in everything; tests override what should be wrong."""

    name = "simple"

    def variants(self) -> Any:
        """One."""
        return [Variant(method=self.name, label=f"{self.name}8")]

    def key_bits(self, variant: Any, part: Any) -> Any:
        """Eight."""
        return 8.0

    def value_bits(self, variant: Any, part: Any) -> Any:
        """Eight."""
        return 8.0

    def quality_prior(self, variant: Any) -> Any:
        """A claim."""
        return QualityPrior(kl_mean=0.01, low=0.0, high=0.1, source="a test")


@pytest.fixture
def simple() -> type[Simple]:
    """The class to subclass."""
    return Simple


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed every distribution of `dists`, from source, without a network."""
    oldest = 77  # what the distributions ask for, and the first that builds wheels by itself on every Python we support
    if int(version("setuptools").partition(".")[0]) < oldest and "VELOXQUANT_NO_SKIP" not in os.environ:
        pytest.skip("needs setuptools 77 or newer to build distributions; `make test` installs it")
    work = tmp_path_factory.mktemp("third-party")
    sources = Path(shutil.copytree(DISTS, work / "sources"))
    target = work / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(target)]
    done = subprocess.run(
        [*command, *(str(folder) for folder in sorted(sources.iterdir()))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def plugin_module(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function (name, source) that writes a module into a folder on sys.path and gives it as a plugin."""
    folder = short_folder / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, source: str) -> Plugin:
        (folder / f"{name}.py").write_text(source)
        return Plugin(distribution=f"dist-{name}", name=name, value=name, version="1")

    return write

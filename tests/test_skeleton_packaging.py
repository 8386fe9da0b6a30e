"""What is packed and what is promised: the wheel is whole, the Makefile works on a bare clone, links lead somewhere."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "launchd").glob("*.md")])
LEFT_BEHIND = (
    ".git",
    ".venv*",
    ".cache",
    "*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "*.pyc",
)
PACKED = ("*.py", "*.json", "*.toml", "*.html", "py.typed", "*.plist", "*.service", "*.socket")


def tree(folder: str, package: str) -> set[str]:
    """Files of a source folder, as paths inside the wheel."""
    found = (path for pattern in PACKED for path in (ROOT / folder).rglob(pattern))
    return {f"{package}/{path.relative_to(ROOT / folder).as_posix()}" for path in found}


def test_the_package_list_is_the_tree() -> None:
    """Every folder of Python files is packed; none is listed that is not there."""
    folders = {path.parent for path in (ROOT / "veloxquant").rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {
        "veloxquant_plugins",
        "veloxquant_launchd",
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel a user would install, built from a copy of the tree with the setuptools that is installed."""
    oldest = 77  # the first with licence expressions
    if int(version("setuptools").partition(".")[0]) < oldest and "VELOXQUANT_NO_SKIP" not in os.environ:
        pytest.skip("needs setuptools 77 or newer to build a wheel; `make test` installs it")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("veloxquant", "plugins", "launchd"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_is_the_tree(wheel: Path) -> None:
    """All code, tables and the typing marker are in the wheel; tests, benches and caches are not."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    folders = {"veloxquant": "veloxquant", "plugins": "veloxquant_plugins", "launchd": "veloxquant_launchd"}
    assert packed == set().union(*(tree(folder, package) for folder, package in folders.items()))
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_has_its_doors(wheel: Path) -> None:
    """Console scripts and method entry points are the ones of pyproject.toml."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        doors = configparser.ConfigParser()
        doors.read_string(archive.read(name).decode())
    assert dict(doors["console_scripts"]) == PROJECT["project"]["scripts"]
    assert dict(doors["veloxquant.methods"]) == PROJECT["project"]["entry-points"]["veloxquant.methods"]


def test_the_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Installed without the source tree, both commands start and name the wheel's version; the agent is filled in."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import veloxquant; print(veloxquant.__file__)").startswith(str(tmp_path))
    for command in ("veloxquantctl", "veloxquantd"):
        assert wheel.name.split("-")[1] in run(str(tmp_path / "bin" / command), "--version")
    template = run("-c", "from veloxquant.service import templates; print(templates.read('veloxquant.socket'), end='')")
    assert template == (ROOT / "launchd" / "veloxquant.socket").read_text(encoding="utf-8")


def test_the_source_distribution_is_the_project(tmp_path: Path) -> None:
    """Everything but what tools leave behind is in it, so that its tests can be run."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    folders = [source / ".ci", *(path for path in source.iterdir() if path.is_dir() and path.name[0] != ".")]
    files = [source / name for name in ("pyproject.toml", "Makefile", "MANIFEST.in", "LICENSE", ".gitignore")]
    files += source.glob("*.md")
    files += [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    there = {path.relative_to(source).as_posix() for path in files}
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    of_the_build = {name for name in packed if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert packed - of_the_build == there


def test_the_extras_have_names_that_pip_knows(wheel: Path) -> None:
    """`veloxquant[demo]` and `veloxquant[test]` can be asked for, and the demo brings no tool of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    assert {"Provides-Extra: demo", "Provides-Extra: test"} <= set(lines)
    of_demo = {re.split(r"[\[>=; ]", one)[0] for one in PROJECT["project"]["optional-dependencies"]["demo"]}
    assert of_demo & {"pytest", "ruff", "mypy", "hypothesis", "import-linter"} == set()


def targets() -> set[str]:
    """Words that `make` understands."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_make_alone_lists_the_targets() -> None:
    """`make` without a word changes nothing and lists every target a person may name."""
    done = subprocess.run(
        ["make"], cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert {line.split()[0] for line in done.stdout.splitlines()[1:]} == targets()
    assert {"help", "demo", "test"} <= targets()


def test_make_says_what_to_install_when_python_is_too_old(tmp_path: Path) -> None:
    """Without a Python that is new enough, make stops and names the way to get one."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    run = ["make", "install", "PYTHON=/usr/bin/false"]
    clean = {"PATH": os.environ["PATH"]}
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode != 0
    assert "/usr/bin/false is not Python 3.11 or newer" in done.stderr
    assert "brew install python" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_says_where_it_looked_for_python(tmp_path: Path) -> None:
    """On a machine whose every Python is too old, the message names what was tried."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tmp_path / "bin" / name).symlink_to("/bin/false")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    run = ["make", "install"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": path})
    assert done.returncode != 0
    assert "found no Python 3.11 or newer with venv and ensurepip" in done.stderr
    assert "looked for: python3 python3.13 python3.12 python3.11 python3.14" in done.stderr


@pytest.mark.parametrize(
    ("target", "extra"),
    [("install", "test"), ("lint", "test"), ("types", "test"), ("demo", "demo"), ("bench", "demo"), ("soak", "demo")],
)
def test_each_target_installs_what_it_needs(target: str, extra: str, tmp_path: Path) -> None:
    """Whoever only wants the demo gets no linter; a folder with a blank in its name is like any other."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    run = ["make", "--dry-run", target]
    clean = {"PATH": os.environ["PATH"]}
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True, env=clean)
    assert re.findall(r"--editable '\.\[(\w+)\]'", done.stdout) == [extra]


def test_make_uses_nothing_that_old_make_lacks() -> None:
    """GNU make 3.81, the one macOS ships, reads the file: no construct of 3.82 or later is used (see its NEWS)."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(
        r"^\.ONESHELL|^\.RECIPEPREFIX|^\.SHELLFLAGS|!=|::=|\$\(file |^undefine|^private|&:", text, re.MULTILINE
    )
    for old in re.findall(r"^define\b.*$", text, re.MULTILINE):
        assert "=" not in old


def test_make_runs_only_what_is_there() -> None:
    """Every script that a target runs is in the tree."""
    scripts = set(re.findall(r"bench/\w+\.py", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert {script for script in scripts if not (ROOT / script).is_file()} == set()
    assert "bench/demo.py" in scripts


def test_ci_runs_exactly_make_test() -> None:
    """CI and a contributor run the same word."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', ".ci/browser", ".ci/systemd", "exec make test"]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [("browser", "no browser could be installed\n"), ("systemd", "systemd's tools could not be installed\n")],
)
def test_ci_goes_on_without_what_cannot_be_had(script: str, complaint: str, tmp_path: Path) -> None:
    """Neither a user that may not install nor a package source that fails stops the run, or is waited for."""
    for name, says in (("id", "echo 0"), ("apt-get", "exit 100"), ("timeout", 'shift; "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    run, clean = [str(shutil.which("bash")), str(ROOT / ".ci" / script)], {"PATH": str(tmp_path)}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", complaint)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links and heading anchors of the documents exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def anchors(document: Path) -> set[str]:
    """Heading anchors as GitHub makes them: lower case, punctuation dropped, blanks to hyphens."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_only_targets_that_exist(document: Path) -> None:
    """A `make` command in a document is one that make understands."""
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", document.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named <= targets()


def test_every_dependency_has_a_reason() -> None:
    """docs/decisions/0002-dependencies.md has a line for each package the project installs."""
    text = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text(encoding="utf-8")
    extras = PROJECT["project"]["optional-dependencies"].values()
    everything = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[\[>=; ]", line)[0] for line in everything} - {PROJECT["project"]["name"]}
    assert {name for name in names if f"`{name}`" not in text} == set()

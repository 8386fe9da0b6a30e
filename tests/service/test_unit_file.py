"""The units: any text survives systemd's syntax, read back by us and by systemd itself; what is not ours is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import ServiceRefused
from veloxquant.service import installed, places, unit_file, unit_text
from veloxquant.service.values import SOCKET_UNIT, UNIT, Order

RUNTIME = "/run/user/501"
PRINTABLE = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)
HOSTILE = ["a b", "%n%h%%", "$HOME${X}", "#;{}[]", "Åsa 日本 🙂", "@COMMAND@", "&|<>`id`", "  two  "]


@given(PRINTABLE, st.lists(PRINTABLE, max_size=3))
def test_words_come_back(program: str, arguments: list[str]) -> None:
    """What is quoted for ExecStart is read as the same words."""
    value = " ".join([unit_text.quote(program), *map(unit_text.argument, arguments)])
    assert unit_text.command(value, "/home/anna") == (program.lstrip("-:+!"), *arguments)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/usr/bin/veloxquantd", ("/usr/bin/veloxquantd",)),
        ("-/usr/bin/veloxquantd --socket '/a b'", ("/usr/bin/veloxquantd", "--socket", "/a b")),
        (r""""/a \"b\"" c\sd "e'f" 'g"h' i""", ('/a "b"', "c d", "e'f", 'g"h', "i")),
        ("%h/.local/bin/veloxquantd 100%% $$x", ("/home/anna/.local/bin/veloxquantd", "100%", "$x")),
        ("", ()),
    ],
)
def test_a_command_is_read_as_the_manual_says(value: str, words: tuple[str, ...]) -> None:
    """systemd.service(5), COMMAND LINES: prefixes, both quotes, escapes, specifiers, doubled marks."""
    assert unit_text.command(value, "/home/anna") == words


def test_sections_are_read_as_the_manual_says() -> None:
    """systemd.syntax(7): comments, continued lines, blanks around the equals sign; the last value counts."""
    text = "# a\n[Unit]\n; b\nDescription = c \\\n d\n[Service]\nExecStart=x\nExecStart=y=z\n\n[Unit]\nAfter=e\n"
    assert unit_text.sections(text) == {
        "Unit": {"Description": "c   d", "After": "e"},
        "Service": {"ExecStart": "y=z"},
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_systemd_finds_the_program_under_a_hostile_name(name: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` looks whether the program is there: it is, exactly where systemd is installed."""
    folder = tmp_path / name
    folder.mkdir()
    program = folder / "veloxquantd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    words = (str(program), "--socket", f"{folder}/'\"\\ $x")
    texts = unit_file.render(Order(words, folder / "d.sock", {"VELOXQUANT_X": f"{name}'\"\\"}), RUNTIME)
    units = tmp_path / "units"
    units.mkdir()
    for unit, content in texts.items():
        (units / unit).write_bytes(content)
    found = unit_file.installed(units, Path("/home/anna"))
    assert found is not None
    assert found.program == words
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        command = [analyze, "verify", "--user", *(str(units / unit) for unit in texts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        program.unlink()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"{program} is not executable" in done.stderr


@pytest.mark.parametrize("mark", ["'", '"', "\\"])
def test_a_program_that_systemd_would_not_start_is_refused(mark: str) -> None:
    """Systemd takes no quote and no backslash in a program's path; the error says what to do."""
    with pytest.raises(ServiceRefused, match="quote or a backslash") as caught:
        unit_file.render(Order((f"/opt/{mark}/veloxquantd",)), RUNTIME)
    assert "--program" in caught.value.hint


@pytest.mark.parametrize("text", ["/a\nExecStartPost=/bin/x", "/a\x1b", "/a\0", "/a\udcff"])
def test_control_characters_are_refused_everywhere(text: str) -> None:
    """A line break in a path must not become a line of the unit."""
    for order in (Order((text,)), Order(("/x", text)), Order(("/x",), Path(text)), Order(("/x",), None, {"V": text})):
        with pytest.raises(ServiceRefused, match="control characters"):
            unit_file.render(order, RUNTIME)


@pytest.mark.parametrize(
    ("path", "listen"),
    [
        (f"{RUNTIME}/veloxquant/d.sock", "%t/veloxquant/d.sock"),
        (f"{RUNTIME}5/d.sock", f"{RUNTIME}5/d.sock"),
        ("/srv/100%/d.sock", "/srv/100%%/d.sock"),
    ],
)
def test_where_systemd_listens(path: str, listen: str) -> None:
    """The runtime folder by its specifier, so that the unit holds for every login; others as they are."""
    text = unit_file.render(Order(("/x",), Path(path)), RUNTIME)[SOCKET_UNIT].decode()
    assert unit_text.sections(text)["Socket"]["ListenStream"] == listen


@pytest.mark.parametrize("path", ["/a/d.sock ", "/a/d.sock\\"])
def test_a_socket_that_a_unit_cannot_name_is_refused(path: str) -> None:
    """ListenStream knows no quotes: blanks at the end are cut off, a backslash there joins lines."""
    with pytest.raises(ServiceRefused, match="cannot listen"):
        unit_file.render(Order(("/x",), Path(path)), RUNTIME)


def test_the_installed_agent_is_read_without_systemd() -> None:
    """What doctor executes, with the socket unit where there is one."""
    assert installed(platform="linux") is None
    folder = places.unit_folder()
    folder.mkdir(parents=True)
    (folder / UNIT).write_text('[Service]\nExecStart="%h/my bin/veloxquantd" --socket /s\n')
    found = installed(platform="linux")
    assert found is not None
    assert found.program[0].endswith("/home/my bin/veloxquantd")
    assert (found.manager, found.program[1:], found.socket_unit) == ("systemd", ("--socket", "/s"), None)
    (folder / SOCKET_UNIT).touch()
    found = installed(platform="linux")
    assert found is not None
    assert found.socket_unit == folder / SOCKET_UNIT


@pytest.mark.parametrize("text", ["", "[Service]\n", "[Service]\nExecStart=/usr/bin/other\n", "\xff"])
def test_a_unit_that_runs_something_else_is_refused(text: str) -> None:
    """A file of our name that is not ours."""
    folder = places.unit_folder()
    folder.mkdir(parents=True)
    (folder / UNIT).write_bytes(text.encode("latin-1"))
    with pytest.raises(ServiceRefused, match="not veloxquant's unit"):
        installed(platform="linux")

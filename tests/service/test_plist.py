"""The property list: any text survives it, as two parsers that share nothing read it; what is not ours is refused."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import ServiceRefused
from veloxquant.service import installed, places, plist, templates
from veloxquant.service.values import LABEL, Order

HOSTILE = [
    "/Users/anna/my tools/bin/veloxquantd",
    "/Users/a&b/<c>/'d'/\"e\"/veloxquantd",
    "/Users/%n%h/$HOME/`id`/veloxquantd",
    "/Users/Åsa/日本/🙂/veloxquantd",
    "/Users/a]]>b/<!--/-->/&amp;/veloxquantd",
    "/Users/@HOME@/@PROGRAM@/@SOCKET@/veloxquantd",
]


def by_hand(node: ET.Element) -> Any:
    """A property list's value from its XML, by the DTD (Apple, PropertyList-1.0.dtd), without plistlib."""
    if node.tag == "dict":
        keys, values = node[::2], node[1::2]
        assert all(key.tag == "key" for key in keys)
        assert len(keys) == len(values)
        return {key.text or "": by_hand(value) for key, value in zip(keys, values, strict=True)}
    if node.tag == "array":
        return [by_hand(child) for child in node]
    simple = {"string": lambda text: text, "integer": int, "true": lambda _: True, "false": lambda _: False}
    return simple[node.tag](node.text or "")


def second_parser(content: bytes) -> Any:
    """The root value. The document type is checked, too: launchd reads no other."""
    assert content.startswith(
        b'<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN"'
    )
    root = ET.fromstring(content)  # noqa: S314 -- our own output
    assert (root.tag, root.attrib, len(root)) == ("plist", {"version": "1.0"}, 1)
    return by_hand(root[0])


@pytest.mark.parametrize("program", HOSTILE)
def test_both_parsers_read_the_path_that_was_given(program: str) -> None:
    """Blanks, quotes, ampersands, percent signs, unicode, and what looks like markup."""
    order = Order((program, "--socket", program), Path(program), {"VELOXQUANT_RECORDS": program})
    content = plist.render(order, Path(program))
    found = plistlib.loads(content)
    assert second_parser(content) == found
    assert found["ProgramArguments"] == [program, "--socket", program]
    assert found["EnvironmentVariables"]["VELOXQUANT_RECORDS"] == program
    assert found["Sockets"]["daemon"] == {"SockPathName": program, "SockPathMode": 0o600}
    assert found["StandardErrorPath"] == program


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff"), min_size=1))
def test_any_printable_text_survives(text: str) -> None:
    """Whatever a file system allows as a name, but control characters."""
    content = plist.render(Order((text,)), Path("/x.log"))
    assert second_parser(content)["ProgramArguments"] == plistlib.loads(content)["ProgramArguments"] == [text]


@pytest.mark.parametrize("text", ["/a\0b", "/a\x1bb", "/a\udcffb"], ids=["NUL", "escape", "no UTF-8"])
def test_what_xml_cannot_hold_is_refused(text: str) -> None:
    """An error in words, in place of a file that launchd cannot read."""
    with pytest.raises(ServiceRefused, match="no property list can hold"):
        plist.render(Order((text,)), Path("/x.log"))


def test_the_same_order_gives_the_same_bytes() -> None:
    """Otherwise every installation would load the agent anew."""
    order = Order((HOSTILE[0],), Path("/s"), {"VELOXQUANT_A": "1", "VELOXQUANT_B": "2"})
    assert plist.render(order, Path("/x.log")) == plist.render(order, Path("/x.log"))


@pytest.mark.parametrize("attribute", ["PACKAGE", "LABEL"])
def test_templates_that_are_not_installed_are_an_error_in_words(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout that was installed before it had them."""
    monkeypatch.setattr(templates if attribute == "PACKAGE" else plist, attribute, "veloxquant_absent")
    with pytest.raises(ServiceRefused, match="is not installed"):
        plist.render(Order(("/x",)), Path("/x.log"))


def test_the_installed_agent_is_read_without_launchd() -> None:
    """What doctor executes: ProgramArguments, with Program in its first place where the file has one."""
    assert installed(platform="darwin") is None
    path = places.launch_agent()
    path.parent.mkdir(parents=True)
    path.write_bytes(plist.render(Order(("/opt/veloxquantd", "--socket", "/s")), Path("/x.log")))
    found = installed(platform="darwin")
    assert found is not None
    assert (found.manager, found.path, found.program) == ("launchd", path, ("/opt/veloxquantd", "--socket", "/s"))
    path.write_bytes(plistlib.dumps({"Label": LABEL, "Program": "/p", "ProgramArguments": ["shown", "a"]}))
    found = installed(platform="darwin")
    assert found is not None
    assert found.program == ("/p", "a")


@pytest.mark.parametrize(
    "content",
    [{"Label": LABEL, "ProgramArguments": "/x"}, {"Label": LABEL, "ProgramArguments": [1]}, {"Label": LABEL}, {}],
)
def test_an_agent_without_a_program_is_refused(content: dict[str, Any]) -> None:
    """A file of our name that starts nothing."""
    path = places.launch_agent()
    path.parent.mkdir(parents=True)
    path.write_bytes(plistlib.dumps(content))
    with pytest.raises(ServiceRefused, match="not veloxquant's agent"):
        installed(platform="darwin")


def test_a_folder_in_place_of_the_file_is_refused() -> None:
    """Not a traceback."""
    places.launch_agent().mkdir(parents=True)
    with pytest.raises(ServiceRefused, match="it is not a regular file"):
        installed(platform="darwin")

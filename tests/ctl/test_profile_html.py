"""The page of a profile: complete by itself, obeys nothing a model wrote, and looks right in a real browser."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import profile_kit
from profile_kit import made_up

from veloxquant.ctl import profile_html, profile_plots
from veloxquant.errors import InvalidParams

MANY = ["fp16", *(f"affine{bits}-g{group}" for bits in (2, 3, 4, 6, 8) for group in (32, 64)), "someones-" + "x" * 50]
"""Twelve methods, one with a name as long as a name may be."""
HOSTILE = "<script>alert(1)</script></pre><img src='http://192.0.2.1/x.png' onerror=alert(1)>{{ 7 * 7 }}&lt;"
PAGES = {
    "usual": made_up(["fp16", "affine4-g64"], layers=32, text="The capital of France is Paris."),
    "crowded": made_up(MANY, layers=80, text="word " * 2000, prompt=HOSTILE, model_id="a-name-" * 12),
    "one layer": made_up(["fp16"], layers=1, text="x" * 5000, prompt="y" * 10_000),
    "nothing ran": made_up([], prompt=HOSTILE),
}


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """One more."""
        self.text += data


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fetches_and_runs_nothing(name: str) -> None:
    """No script, no handler, no address but names of XML; a policy in the page forbids the rest."""
    page = Page(profile_html.page(PAGES[name]))
    assert {"script", "img", "iframe", "object", "base", "form"} & set(page.tags) == set()
    assert [key for key, _ in page.attributes if key.startswith("on")] == []
    addresses = [(key, value) for key, value in page.attributes if key in ("src", "href", "xlink:href")]
    assert all((value or "").startswith(("#", "data:")) for _, value in addresses)
    (policy,) = [value for key, value in page.attributes if key == "content" and "default-src" in (value or "")]
    assert "default-src 'none'" in str(policy)


def test_what_a_model_wrote_is_text() -> None:
    """Prompt, text and names are shown letter by letter."""
    result = made_up(["fp16"], text=HOSTILE, prompt=HOSTILE, model_id=HOSTILE)
    shown = Page(profile_html.page(result)).text
    assert shown.count(HOSTILE) >= 4  # title, heading, text, prompt


def test_every_id_is_there_once_and_every_reference_leads_somewhere() -> None:
    """Four figures on one page: none draws with the clip path of another."""
    page = Page(profile_html.page(PAGES["usual"]))
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    used = {(value or "")[1:] for key, value in page.attributes if key == "xlink:href"}
    used |= set(re.findall(r"url\(#([^)]+)\)", " ".join(value or "" for _, value in page.attributes)))
    assert used <= set(ids)


def test_colours_are_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure has a colour of its own, so that a dark page has light lines."""
    for plot in profile_plots.plots(PAGES["crowded"]):
        assert re.findall(r"#[0-9a-f]{6}\b", plot.svg) == []
        assert "currentColor" in plot.svg


@pytest.mark.parametrize(("name", "count"), [("usual", 4), ("crowded", 4), ("one layer", 4), ("nothing ran", 0)])
def test_four_figures_say_what_they_show(name: str, count: int) -> None:
    """Memory over tokens, time per layer, bytes and speed side by side, each with its unit in the caption."""
    plots = profile_plots.plots(PAGES[name])
    assert len(plots) == count
    for plot, unit in zip(plots, ("MiB", "microseconds", "MiB", "milliseconds"), strict=False):
        assert unit in plot.caption.replace("GiB", "MiB")
    assert profile_html.page(PAGES[name]).count("Apple M4 Max, 40 GPU cores") >= count + 1


def test_the_page_is_the_same_for_the_same_profile() -> None:
    """Nothing in it depends on when it was drawn."""
    assert profile_html.page(PAGES["usual"]) == profile_html.page(PAGES["usual"])


def test_a_page_replaces_the_old_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be drawn or written leaves the old page and no other file."""
    path = profile_html.check(str(tmp_path / "page.html"))
    profile_html.write(PAGES["usual"], path)
    old = path.read_bytes()
    assert old.startswith(b"<!DOCTYPE html>")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InvalidParams, match="No space left") as refused:
        profile_html.write(PAGES["one layer"], path)
    assert refused.value.field == "--html"
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The page goes where the link points to."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "latest.html").symlink_to(tmp_path / "pages" / "one.html")
    profile_html.write(PAGES["one layer"], profile_html.check(str(tmp_path / "latest.html")))
    assert (tmp_path / "latest.html").is_symlink()
    assert (tmp_path / "pages" / "one.html").is_file()


def test_without_the_extra_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib is no part of a plain installation."""
    find = profile_html.importlib.util.find_spec
    monkeypatch.setattr(
        profile_html.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(InvalidParams, match="needs matplotlib") as refused:
        profile_html.check("page.html")
    assert refused.value.hint == "pip install 'veloxquant[report]'"


def chromium() -> str:
    """A browser, or the test is skipped."""
    program = profile_kit.browser()
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(profile_kit.NAMES)} is installed")
    return program


FAULTY = """<!DOCTYPE html><meta charset="utf-8"><body><script>console.error("a fault")</script>
<div style="width:3000px">wide</div><img src="http://nonesuch.invalid/x.png" alt="">
<svg viewBox="0 0 100 50" width="100" height="50"><text x="0" y="20">aaaa</text><text x="5" y="22">bbbb</text>
<text x="90" y="40">outside</text></svg>"""


def test_the_browser_sees_faults(short_folder: Path) -> None:
    """Each thing that the next test finds absent is found on a page that has it."""
    path = short_folder / "page.html"
    path.write_text(FAULTY, encoding="utf-8")
    found, console = profile_kit.look(chromium(), path, 400, short_folder)
    assert any("a fault" in line for line in console)
    assert found["scroll_width"] > 3000
    assert found["wide"] == ["div wide"]
    assert found["overlaps"] == [["aaaa", "bbbb"]]
    assert found["outside"] == ["outside"]
    assert found["fetched"] == ["http://nonesuch.invalid/x.png"]
    assert found["scripts"] == 1


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_it_looks_right_in_a_browser(name: str, width: int, short_folder: Path) -> None:
    """On a phone and on a desk: every figure has a size, nothing is wider than the window, no label meets another."""
    program = chromium()
    path = short_folder / "page.html"
    profile_html.write(PAGES[name], path)
    found, console = profile_kit.look(program, path, width, short_folder)
    assert console == []
    assert (found["width"], found["scroll_width"]) == (width, width)
    assert (found["wide"], found["overlaps"], found["outside"]) == ([], [], [])
    assert (found["fetched"], found["scripts"]) == ([], 0)
    count = len(profile_plots.plots(PAGES[name]))
    assert len(found["svgs"]) == count
    assert all(across > 250 and down > 80 for across, down in found["svgs"])
    assert count == 0 or found["texts"] > 20
    assert count == 0 or found["smallest"] >= 5  # a single digit is narrow
    assert count == 0 or found["letters"] >= 10


@pytest.mark.parametrize(("width", "is_cut"), [(400, True), (1280, False)])
def test_a_table_that_is_cut_says_so(width: int, short_folder: Path, *, is_cut: bool) -> None:
    """On a phone a line above the table tells that it scrolls; on a desk all of it is there, and no line."""
    program = chromium()
    path = short_folder / "page.html"
    profile_html.write(PAGES["crowded"], path)
    found, _ = profile_kit.look(program, path, width, short_folder)
    assert (found["cut"] > 0, found["hints"] > 0) == (is_cut, is_cut)

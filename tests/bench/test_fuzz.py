"""The fuzzer's targets in short: every kept input, and some of hypothesis's own; `make fuzz` goes on from here."""

from __future__ import annotations

import re

import pytest
from fuzz import run, targets, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veloxquant.errors import VeloxError

TINY_TOTAL_BYTES = 300_000
SHORT = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
SLOW = ("planning",)
"""A plan takes milliseconds; its inputs are tried, and few are made up."""


@st.composite
def mutated(draw: st.DrawFn, target: str) -> bytes:
    """A kept input with a piece cut out, put in or doubled; now and then bytes of any kind."""
    kept = draw(st.sampled_from(targets.corpus(target))).read_bytes()
    begin = draw(st.integers(0, len(kept)))
    end = draw(st.integers(begin, min(len(kept), begin + 40)))
    piece = draw(
        st.sampled_from([b"", kept[begin:end] * 2, b"null", b"-1", b"1e999", b'"\\ud800"']) | st.binary(max_size=8)
    )
    return kept[:begin] + piece + kept[end:]


@pytest.mark.parametrize("target", targets.TARGETS)
def test_r13_every_kept_input_gives_a_value_or_a_typed_error(target: str) -> None:
    """Seeds, inputs that reached new code, and everything that was ever a find."""
    kept = targets.corpus(target)
    assert kept
    for path in kept:
        targets.TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", [name for name in targets.TARGETS if name not in SLOW])
def test_r13_what_is_near_a_kept_input_gives_a_value_or_a_typed_error(target: str) -> None:
    """The same promise a step away from them."""

    @SHORT
    @given(data=mutated(target))
    def holds(data: bytes) -> None:
        targets.TARGETS[target](data)

    holds()


def test_a_target_lets_anything_but_a_typed_error_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fuzzer could find nothing."""

    def careless(_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("fuzz.wire_targets.messages.decode_request", careless)
    with pytest.raises(KeyError):
        targets.TARGETS["request"](b"{}")
    monkeypatch.setattr("fuzz.wire_targets.messages.decode_request", lambda _: (_ for _ in ()).throw(VeloxError("no")))
    targets.TARGETS["request"](b"{}")


def test_the_kept_corpus_is_small() -> None:
    """A repository is no place for megabytes of noise, and each target has its seeds."""
    sizes = [path.stat().st_size for target in targets.TARGETS for path in targets.corpus(target)]
    assert sum(sizes) <= TINY_TOTAL_BYTES
    assert {path.name for path in targets.CORPUS.iterdir()} == set(targets.TARGETS)


def test_without_atheris_the_fuzzer_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has wheels for one platform; elsewhere the corpus is run by these tests."""
    monkeypatch.setattr("sys.argv", ["run.py", "--minutes", "1"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run.main() == 2
    assert "fuzz_unavailable" in (told := capsys.readouterr().err)
    assert "pip install" in told


def test_the_fuzzers_words_are_a_dictionary_that_libfuzzer_reads() -> None:
    """Each in quotes on a line, ASCII, and of quotes and backslashes only escaped ones."""
    known = words.known()
    assert {"plan", r"\"model\"", "daemon.log_level", r"\"num_hidden_layers\"", "Infinity"} <= set(known)
    for word in known:
        assert word.isascii()
        assert re.fullmatch(r'(?:[^"\\]|\\["\\]|\\x[0-9a-f]{2})+', word), word

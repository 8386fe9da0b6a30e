"""The error tree: as its docstring draws it, and how a message quotes what it refuses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant import errors
from veloxquant.errors import VeloxError, quoted

KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, VeloxError)}
DRAWN = re.findall(r"^ {4}[ │├└─]*([A-Z]\w+) ", errors.__doc__ or "", flags=re.MULTILINE)


class _Silent:
    def __repr__(self) -> str:
        raise RuntimeError


def test_the_tree_that_is_drawn_is_the_tree() -> None:
    """Every class stands in the docstring once, below its base."""
    assert sorted(DRAWN) == sorted(KINDS)
    for name, kind in KINDS.items():
        if kind is not VeloxError:
            assert DRAWN.index(kind.__base__.__name__) < DRAWN.index(name)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_drawn_name_is_the_name_of_its_class(name: str) -> None:
    """Where the drawing gives a stable name or an exit code, the class has it."""
    (line,) = [line for line in (errors.__doc__ or "").splitlines() if re.search(rf"\b{name} ", line)]
    stable = re.search(r" ([a-z]+_[a-z_]+)\b", line)
    assert stable is None or stable[1] == KINDS[name].name
    code = re.search(r"exit (\d+)", line)
    assert code is None or int(code[1]) == KINDS[name].exit_code


@given(st.one_of(st.integers(), st.text(), st.binary(), st.lists(st.text())))
def test_a_quoted_value_is_one_short_line(value: object) -> None:
    """As Python writes it, cut where it is long."""
    shown = quoted(value)
    assert len(shown) <= 60
    assert shown == repr(value) or shown.endswith("...")
    assert "\n" not in shown


@pytest.mark.parametrize("value", [10**5000, [10**5000], _Silent()], ids=["number", "list", "object"])
def test_what_cannot_be_printed_is_still_refused_in_words(value: object) -> None:
    """An error about a value must not fail on the value."""
    assert quoted(value) == "a value that cannot be printed"

"""The size budget: files and functions stay small enough to read, each says what it is for and what it returns."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
FILE_MEDIAN, FILE_P90, FILE_MAX = 120, 300, 400
FUNCTION_MEDIAN, FUNCTION_P90, FUNCTION_MAX = 10, 30, 60
TEST_FILE_MAX = 600
NESTING_MAX = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
_NESTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)

FOLDERS = ("veloxquant", "plugins", "launchd", "bench")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def p90(values: list[int]) -> float:
    """The 90th percentile."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def functions(path: Path) -> Iterator[Function]:
    """Every function and method of a file, inner ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def line_count(function: Function) -> int:
    """Lines from `def` to the last statement, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How deep control statements lie in each other. An elif is as deep as its if; an inner function starts anew."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, _NESTS) and not is_elif)))
    return deepest


def place(path: Path, function: Function) -> str:
    """Where to look."""
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


def test_files_stay_short() -> None:
    """Median, 90th percentile and largest file of the product keep to the budget."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert [f"{path.relative_to(ROOT)}: {count}" for path, count in lines.items() if count > FILE_MAX] == []
    assert statistics.median(lines.values()) <= FILE_MEDIAN
    assert p90(list(lines.values())) <= FILE_P90


def test_functions_stay_short() -> None:
    """Median, 90th percentile and largest function of the product keep to the budget."""
    lines = {place(path, one): line_count(one) for path in SOURCES for one in functions(path)}
    assert {where: count for where, count in lines.items() if count > FUNCTION_MAX} == {}
    assert statistics.median(lines.values()) <= FUNCTION_MEDIAN
    assert p90(list(lines.values())) <= FUNCTION_P90


def test_code_is_flat() -> None:
    """No function nests control statements more than three deep."""
    depths = {place(path, one): nesting(one) for path in SOURCES for one in functions(path)}
    assert {where: depth for where, depth in depths.items() if depth > NESTING_MAX} == {}


def test_test_files_stay_short() -> None:
    """No test file is longer than 600 lines."""
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS}
    assert {path: count for path, count in lines.items() if count > TEST_FILE_MAX} == {}


def test_every_function_says_what_it_returns() -> None:
    """All functions, in tests too, have a return annotation."""
    assert [place(path, one) for path in [*SOURCES, *TESTS] for one in functions(path) if one.returns is None] == []


def test_every_file_says_what_it_is_for() -> None:
    """All files, in tests too, open with a docstring."""
    silent = [
        path for path in [*SOURCES, *TESTS] if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_every_test_is_a_sentence() -> None:
    """Every test function has a docstring that says what a user may rely on."""
    silent = [
        place(path, one)
        for path in TESTS
        for one in functions(path)
        if one.name.startswith("test_") and ast.get_docstring(one) is None
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("code", "depth"),
    [
        ("def f(): return 1", 0),
        ("def f():\n if a: pass\n elif b: pass\n elif c: pass\n else: pass", 1),
        ("def f():\n for a in b:\n  if a:\n   while c: pass", 3),
        ("def f():\n if a: pass\n else:\n  x = 1\n  if b: pass", 2),
        ("def f():\n try: pass\n except E:\n  with a:\n   for b in c:\n    if d: pass", 4),
        ("def f():\n if a:\n  def g():\n   if b: pass", 1),
    ],
)
def test_the_measure_of_depth(code: str, depth: int) -> None:
    """Depth is counted as a reader counts it."""
    assert nesting(ast.parse(code).body[0]) == depth

"""What people read, letter by letter; every figure in the files is checked here by arithmetic on the example."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from veloxquant.ctl import doctor, figures, fit, hardware, methods, plan, records, status
from veloxquant.ctl.finding import failed, note, ok
from veloxquant.ctl.terminal import Terminal
from veloxquant.planner.result import Evidence, Note, Speed
from veloxquant.wire import answers

if TYPE_CHECKING:
    from types import SimpleNamespace

Golden = Callable[[str, Callable[[Terminal], None]], None]
FOLDER = Path(__file__).parents[1] / "golden"


def cell(name: str, row: str, column: int) -> str:
    """One cell of a golden file's table: cells are two or more blanks apart."""
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if row in line)
    return [part.strip() for part in line.split("  ") if part.strip()][column]


def test_a_plan_as_text(golden: Golden, example: SimpleNamespace) -> None:
    """Choice, question, room, candidates in columns, what does not fit by its shortfall, notes, evidence."""
    golden("plan", lambda terminal: plan.show(example.plan, terminal))


def test_the_figures_of_the_plan_text(example: SimpleNamespace) -> None:
    """Cache = bytes a token x slots; what is left and what is missing follow from the budget of 6.8 GiB."""
    assert example.slots == 131_584
    token = 32 * 8 * 128 * 2 * 2  # layers x heads x width x (K, V) x two bytes
    assert cell("plan_no_fit", "bytes ", 1) == f"{token:,} a token in 16 bits" == "131,072 a token in 16 bits"
    assert cell("plan", "bytes ", 1) == f"affine4-g64: {token * 4.5 / 16:,.0f} a token" == "affine4-g64: 36,864 a token"
    stored = 36_864 * 131_584 / 2**30
    assert cell("plan", "chosen", 2) == f"{stored:.2f} GiB" == "4.52 GiB"
    assert cell("plan", "chosen", 3) == f"{stored + 1:.2f} GiB" == "5.52 GiB"
    assert cell("plan", "chosen", 4) == f"{11.8 - 4.5 - 0.5 - stored - 1:.2f} GiB" == "1.28 GiB"
    assert cell("plan", "chosen", 5) == f"{1000 / 125:.3g} tok/s" == "8 tok/s"
    assert cell("plan", "chosen", 7) == f"{int((6.8 - 1) * 2**30 // 36_864):,}" == "168,937"
    assert cell("plan", "instead", 1) == f"affine8-g64 fits {int((6.8 - 1) * 2**30 // 69_632):,} tokens"
    assert cell("plan", "affine4-g32", 2) == f"{40_960 * 131_584 / 2**30:.2f} GiB" == "5.02 GiB"
    assert cell("plan", "out     fp16", 2) == f"over by {131_072 * 131_584 / 2**30 + 1 - 6.8:.1f} GiB"
    assert cell("plan", "out     affine8", 2) == f"over by {69_632 * 131_584 / 2**30 + 1 - 6.8:.2f} GiB"


def test_the_least_short_stands_first(example: SimpleNamespace) -> None:
    """Among what does not fit, the variant that misses by least comes first; what cannot run at all comes last."""
    order = [one.label for one in plan.by_shortfall(example.plan.rejected)]
    assert order == ["affine8-g64", "fp16", "affine5-g64"]


def test_a_plan_without_an_answer_as_text(golden: Golden, example: SimpleNamespace) -> None:
    """Nothing fits: the shortfall and what would work instead."""
    golden("plan_no_fit", lambda terminal: plan.show(example.no_fit, terminal))


@pytest.mark.parametrize(
    ("changes", "total_gib", "expected"),
    [
        ({}, 16, "6.8 GiB for caches (11.8 GiB working set - 4.5 GiB weights - 0 B other work - 512 MiB reserve)"),
        (
            {"working_set_bytes": None, "kv_budget_bytes": 11 * 2**30},
            16,
            "11 GiB for caches (16 GiB memory - 4.5 GiB weights - 0 B other work - 512 MiB reserve)",
        ),
        (
            {"kv_budget_bytes": 2**30},
            16,
            (
                "6.8 GiB for caches (11.8 GiB working set - 4.5 GiB weights - 0 B other work - 512 MiB reserve), "
                "capped at 1 GiB by the budget"
            ),
        ),
        (
            {"weights_bytes": 15 * 2**30, "kv_budget_bytes": int(11.8 * 2**30) - int(15.5 * 2**30)},
            16,
            (
                "none for caches, short by 3.7 GiB "
                "(11.8 GiB working set - 15 GiB weights - 0 B other work - 512 MiB reserve)"
            ),
        ),
        ({"weights_bytes": None, "kv_budget_bytes": 2**30}, 16, "1 GiB for caches, as the budget says"),
        ({"working_set_bytes": None, "kv_budget_bytes": None}, None, "not known"),
    ],
)
def test_the_room_for_caches_is_arithmetic(
    example: SimpleNamespace, changes: dict[str, int | None], total_gib: int | None, expected: str
) -> None:
    """The smaller of working set and memory, less what else is there; a cap and a shortfall are said."""
    made = msgspec.structs.replace(
        example.plan,
        budget=msgspec.structs.replace(example.plan.budget, **changes),
        hardware={"total_memory_bytes": None if total_gib is None else total_gib * 2**30},
    )
    out = io.StringIO()
    plan.show(made, Terminal(out, io.StringIO(), color="never"))
    assert out.getvalue().splitlines()[4] == f"room       {expected}"


def test_a_speed_that_is_not_known_says_why(example: SimpleNamespace) -> None:
    """A dash in the table has its reason below it."""
    speed = Speed(
        prefill_tok_s=None,
        decode_tok_s=None,
        latency_ms_per_token=None,
        low=None,
        high=None,
        evidence=Evidence(source="analytic", confidence=0.0, notes=("memory bandwidth is unknown", "and more")),
    )
    chosen = msgspec.structs.replace(example.plan.chosen, speed=speed)
    assert figures.evidence(chosen) == (
        "cache traced (high); speed unknown (memory bandwidth is unknown); quality published (medium)"
    )


def test_what_is_to_be_said_of_the_model_is_said_once(example: SimpleNamespace) -> None:
    """A note of its profile stands below the warnings, unless one of them has it."""
    made = msgspec.structs.replace(
        example.plan,
        model={**example.plan.model, "notes": ["the index states -5 bytes", "mlx-lm is not installed"]},
        warnings=(Note(code="model_not_traced", text="read from its config (mlx-lm is not installed)"),),
    )
    out = io.StringIO()
    plan.show(made, Terminal(out, io.StringIO(), color="never"))
    lines = out.getvalue().splitlines()
    assert lines.count("note       the index states -5 bytes") == 1
    assert out.getvalue().count("mlx-lm is not installed") == 1


def test_a_long_plan_is_cut_and_says_so(golden: Golden, example: SimpleNamespace) -> None:
    """The first rows only, with the count of the others and how to see them."""
    golden("plan_cut", lambda terminal: plan.show(example.plan, terminal, limit=1))


def test_a_fit_table_as_text(golden: Golden, example: SimpleNamespace) -> None:
    """Tokens of context for each of 1, 2, 4 and 8 requests."""
    golden("fit", lambda terminal: fit.show(example.fit, terminal))


def test_the_figures_of_the_fit_text() -> None:
    """Contexts are the budget of 6.8 GiB over slots and bytes a token."""
    budget = int(11.8 * 2**30) - int(4.5 * 2**30) - 2**29
    assert cell("fit", "fp16", 3) == f"{budget // 131_072:,}" == "55,705"
    assert cell("fit", "affine4-g64", 6) == f"{budget // 8 // 36_864:,}" == "24,758"


def test_a_status_as_text(golden: Golden, example: SimpleNamespace) -> None:
    """One dense block: a subject a line, warnings last."""
    golden("status", lambda terminal: status.show(example.status, terminal))


def test_hardware_as_text(golden: Golden, example: SimpleNamespace) -> None:
    """Each field with its unit and source; unknown is said."""
    golden("hardware", lambda terminal: hardware.show(example.hardware, terminal))


SAMPLE = {"heads": 8, "width": 128, "itemsize": 2}
FIXED = 68 * 8 * 2 * 128 * 2
"""4 sinks and 64 recent tokens of the sample layer in 16 bits."""


def bits_at(tokens: int) -> float:
    """All that is resident, a number: 68 tokens in 16 bits, the others in 4.5."""
    return (68 * 16 + (tokens - 68) * 4.5) / tokens


def method_row() -> answers.MethodRow:
    """A method with two variants: one that refuses half the widths, and one that keeps sinks and recent tokens."""
    plain = {"label": "affine4-g64", "params": {"bits": 4, "group": 64}, "widths": [64, 128], "layers": "alike"}
    plain |= {"sample": SAMPLE, "key_bits": 4.5, "value_bits": 4.5, "fixed_bytes": 0}
    plain |= {"bits_at": {"4096": 4.5, "32768": 4.5}}
    plain |= {"kl_mean": 0.057, "kl_low": 0.0078, "kl_high": 0.148, "kl_source": "a paper"}
    tiers = plain | {"label": "tiers", "params": {}, "widths": [64, 96, 128], "layers": "differ", "fixed_bytes": FIXED}
    tiers["bits_at"] = {str(tokens): bits_at(tokens) for tokens in (4096, 32768)}
    taken = dict.fromkeys(("low", "high"), None) | {"choices": [], "help": ""}
    return answers.MethodRow(
        name="affine",
        state="ready",
        version="1",
        summary="the engine's quantized cache",
        idea="one scale and bias a group",
        keeps="sinks and the latest tokens",
        paper="2402.02750",
        source="veloxquant",
        variants=(plain, tiers, {"label": "broken", "params": {}, "failed": "method affine: no"}),
        parameters=(
            taken | {"name": "bits", "kind": "int", "default": 8, "choices": [8, 4], "help": "bits a number"},
            taken | {"name": "seed", "kind": "int", "default": None, "low": 0, "high": 2**20},
            taken | {"name": "clip", "kind": "float", "default": 1.0, "low": 0.5},
        ),
        batchable=False,
        trimmable=True,
        drops_tokens=False,
        fused_attention=True,
    )


def test_one_method_as_text(golden: Golden) -> None:
    """Idea, traits, parameters, and each variant with its figures."""
    golden("method", lambda terminal: methods.show(method_row(), terminal))


def test_the_figures_of_a_method() -> None:
    """68 of 4,096 tokens in 16 bits and the others in 4.5 are 4.691 bits a number; they take 272 KiB."""
    told = (FOLDER / "method.txt").read_text(encoding="utf-8")
    assert FIXED == 278_528 == 272 * 1024
    assert "4.5 bits of K, 4.5 of V, 272 KiB fixed; in all 4.691 at 4,096 tokens and 4.524 at 32,768 tokens" in told
    assert (f"{bits_at(4096):.4g}", f"{bits_at(32768):.4g}") == ("4.691", "4.524")


def record(number: int, **changes: object) -> dict[str, object]:
    """A record as the page carries it."""
    return {
        "id": f"7f3a{number}",
        "method": "affine4-g64",
        "model_id": "Qwen3-8B",
        "context_length": 65536,
        "throughput_tok_s": 33.1,
        "memory_bytes": 15 * 2**30 + 2**28,
        "chip": "M3 Max",
        "mlx_version": "0.32.4",
        "created_at": "2026-09-01T10:00:00+00:00",
        **changes,
    }


def test_records_as_text(golden: Golden) -> None:
    """Figures right-aligned with units, ages counted to now, skipped files with reasons."""
    page = answers.RecordPage(
        generation=1,
        directory="/records",
        total=5,
        offset=0,
        records=(
            record(1),
            record(2, throughput_tok_s=0.0, memory_bytes=0, created_at="not a date"),
            record(3, created_at="2026-08-31T10:00:00"),
        ),
        skipped_total=1,
        skipped=(answers.SkippedRecord(file="91c0.json", reason="throughput_tok_s is NaN"),),
    )
    now = dt.datetime(2026, 9, 1, 12, 0, tzinfo=dt.UTC)
    golden("records", lambda terminal: records.show(page, terminal, now=now))


def test_doctor_as_text(golden: Golden) -> None:
    """A mark, the check, what it found, and the fix behind an arrow; then the count."""
    findings = {
        "socket folder": ok("/run/vq is private"),
        "records": note("842 records used, 3 skipped in /records", "veloxquantctl records --skipped"),
        "methods": failed("quarantined: foo: no module 'bar'", "reinstall veloxquant-foo, then veloxquantctl reload"),
    }
    golden("doctor", lambda terminal: doctor.show(findings, terminal))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_no_line_ends_in_blanks(name: str) -> None:
    """Text that is copied into a report carries no trailing blanks."""
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        assert line == line.rstrip()

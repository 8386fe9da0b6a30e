"""The table of largest contexts says what plans then confirm."""

from __future__ import annotations

from typing import Any

import msgspec
from planner_kit import ask, deepseek_v3, llama_8b, mac, record, snapshot

from veloxquant.planner.fit import FitTable, fit
from veloxquant.planner.request import PlanRequest
from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile

SMALL = mac(16, 11.8)


def _table(profile: ModelProfile, machine: HardwareProfile, records: Any = (), **workload: Any) -> FitTable:
    request = PlanRequest(model=profile, workload=WorkloadProfile(**{"generation_length": 0} | workload))
    return fit(request, snapshot(machine, records=records))


def test_every_cell_fits_and_one_token_more_does_not() -> None:
    """At 1, 2, 4 and 8 slots."""
    for row in _table(llama_8b(), SMALL).rows:
        assert [cell.slots for cell in row.cells] == [1, 2, 4, 8]
        for cell in row.cells:
            asked = {"methods": (row.label,), "num_concurrent_requests": cell.slots, "max_kl": 10}
            assert ask(llama_8b(), SMALL, context_length=cell.max_context_tokens, **asked).chosen.label == row.label
            assert ask(llama_8b(), SMALL, context_length=cell.max_context_tokens + 1, **asked).chosen is None


def test_the_stated_context_does_not_matter() -> None:
    """`fit` asks for the context; the one in the request is not used."""
    one, two = (_table(llama_8b(), SMALL, context_length=n) for n in (1, 10**6))
    assert [row.cells for row in one.rows] == [row.cells for row in two.rows]


def test_weights_that_do_not_fit_leave_no_context() -> None:
    """Zeros and the shortfall."""
    table = _table(llama_8b(), mac(4, 3))
    assert {cell.max_context_tokens for row in table.rows for cell in row.cells} == {0}
    assert table.warnings[0].code == "weights_do_not_fit"


def test_a_table_says_how_the_model_is_known() -> None:
    """As a plan does: read from its config and why, or traced by a process that could not keep the trace."""
    static = msgspec.structs.replace(llama_8b(), source="static", notes=("mlx-lm is not installed: pip install it",))
    unkept = msgspec.structs.replace(llama_8b(), unkept="the disk is full: make room")
    for profile, code, text in (
        (static, "model_not_traced", "mlx-lm is not installed: pip install it"),
        (unkept, "trace_not_kept", "the disk is full: make room"),
    ):
        for answer in (_table(profile, SMALL), ask(profile, SMALL)):
            assert [note.code for note in answer.warnings if text in note.text] == [code]
    assert _table(llama_8b(), SMALL).warnings == ()


def test_refused_variants_are_listed_and_the_engines_own_comes_first() -> None:
    """With their reasons; the table survives JSON."""
    table = _table(deepseek_v3(refused="no swapaxes"), mac(512, 400))
    assert [row.label for row in table.rows] == ["fp16"]
    assert {r.reason for r in table.rejected} == {"not_supported_by_engine"}
    assert msgspec.json.decode(msgspec.json.encode(table), type=FitTable) == table


def test_a_record_lowers_what_fits() -> None:
    """Twice the bytes a token: half the context."""
    seen = record("fp16", memory_bytes=2 * 8192 * 131072)
    plain, measured = (_table(llama_8b(), SMALL, records=r, context_length=8192).rows[0] for r in ((), ((0.9, seen),)))
    ratio = plain.cells[0].max_context_tokens / measured.cells[0].max_context_tokens
    assert 1.95 < ratio < 2.05

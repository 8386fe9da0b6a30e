"""Runs of the command line in this process, and example answers whose every figure is arithmetic on the page."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from veloxquant.client import FakeTransport
from veloxquant.ctl import main as program
from veloxquant.ctl.terminal import Terminal
from veloxquant.planner.fit import FitCell, FitRow, FitTable
from veloxquant.planner.result import (
    Budget,
    Candidate,
    Evidence,
    Fit,
    Layers,
    Memory,
    Note,
    Plan,
    Quality,
    Rejected,
    Speed,
)
from veloxquant.profiles import HardwareProfile
from veloxquant.wire import answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GOLDEN = Path(__file__).parents[1] / "golden"
GIB = 2**30

# Llama-3.1-8B: 32 layers, 8 KV heads of width 128. 131,072 + 512 tokens take 514 steps of 256 slots.
SLOTS = 514 * 256
FP16_TOKEN = 32 * 8 * 128 * 2 * 2
"""131,072 bytes: layers x heads x width x (K, V) x two bytes."""
PACKED_TOKEN = FP16_TOKEN * 9 // 32
"""36,864 bytes: 4 bits and two 16-bit numbers for each 64, so 4.5 bits of 16."""
LAYERS = {
    "total": 32,
    "growing": 32,
    "windowed": 0,
    "recurrent": 0,
    "latent": 0,
    "shared": 0,
    "bytes_per_token": FP16_TOKEN,
    "state_bytes": 0,
}
BUDGET = int(11.8 * GIB) - int(4.5 * GIB) - GIB // 2
EIGHT_BITS = (BUDGET - GIB) // (FP16_TOKEN * 17 // 32)


class Done(NamedTuple):
    """How one run ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run veloxquantctl in this process."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = program.main(list(words))
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTransport:
    """A daemon for the command line that answers what the test puts into `answers`."""
    transport = FakeTransport()
    monkeypatch.setattr("veloxquant.client.SocketTransport", lambda *_args, **_settings: transport)
    return transport


@pytest.fixture
def golden() -> Callable[[str, Callable[[Terminal], None]], None]:
    """Compare what a `show` function writes with the file of that name."""

    def compare(name: str, show: Callable[[Terminal], None]) -> None:
        out = io.StringIO()
        show(Terminal(out, io.StringIO(), color="never"))
        expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
        assert out.getvalue() == expected

    return compare


@pytest.fixture
def golden_text() -> Callable[[str], str]:
    """The golden file of that name."""
    return lambda name: (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[SimpleNamespace]:
    """Plans, a fit table and a status of round, checkable figures."""
    return SimpleNamespace(
        plan=quantized(), no_fit=no_fit(), fit=fit_table(), status=status(), hardware=machine(), gib=GIB, slots=SLOTS
    )


def machine() -> HardwareProfile:
    """A 16 GB Mac as plans see it."""
    return HardwareProfile(
        chip="Apple M2",
        generation=2,
        tier="base",
        gpu_cores=10,
        total_memory_bytes=16 * GIB,
        working_set_bytes=int(11.8 * GIB),
        active_bytes=0,
        bandwidth_gbps=100.0,
        decode_efficiency={"f16": 0.8, "q4": 0.65},
        mlx_version="0.32.4",
        mlx_lm_version="0.32.2",
        os_name="macOS",
        os_version="26.1",
        macos_version="26.1",
        backend="metal",
        sources={"chip": "sysctl machdep.cpu.brand_string", "bandwidth_gbps": "chip table", "tier": "chip name"},
    )


def _candidate(label: str, bytes_per_token: int, kl: float, latency_ms: float, source: Any) -> Candidate:
    stored = bytes_per_token * SLOTS
    peak = stored + GIB
    return Candidate(
        method="affine",
        params={"bits": 4, "group": 64},
        label=label,
        layers=Layers(total=32, growing=32, windowed=0, recurrent=0, latent=0, shared=0, packed=32, kept=0, reasons={}),
        memory=Memory(
            stored_bytes=stored,
            peak_bytes=peak,
            fixed_bytes=0,
            bytes_per_token=bytes_per_token,
            fp16_bytes=FP16_TOKEN * SLOTS,
            ratio=bytes_per_token / FP16_TOKEN,
            largest_buffer_bytes=GIB,
            evidence=Evidence(source="traced"),
        ),
        fit=Fit(
            total_bytes=int(4.5 * GIB) + peak + GIB // 2,
            headroom_bytes=BUDGET - peak,
            max_context_tokens=(BUDGET - GIB) // bytes_per_token,
        ),
        speed=Speed(
            prefill_tok_s=250.0,
            decode_tok_s=1000 / latency_ms,
            latency_ms_per_token=latency_ms,
            low=latency_ms / 2,
            high=latency_ms * 2,
            evidence=source,
        ),
        quality=Quality(
            kl_mean=kl,
            perplexity_delta=None,
            low=kl / 2,
            high=kl * 2,
            evidence=Evidence(source="published", confidence=0.7),
        ),
        cache_config={"prefill_step_size": 128},
        engine_settings=None,
    )


def _facts() -> dict[str, Any]:
    return {
        "plan_id": "0123456789abcdef",
        "generation": 7,
        "source": "daemon",
        "hardware": {"chip": "Apple M2"},
        "model": {"model_id": "Llama-3.1-8B", "model_type": "llama", "source": "traced", "layers": dict(LAYERS)},
        "workload": {
            "context_length": 131072,
            "generation_length": 512,
            "batch_size": 1,
            "num_concurrent_requests": 1,
            "objective": "balanced",
        },
        "engine": {"name": "mlx-lm", "version": "0.32.2"},
        "budget": Budget(
            working_set_bytes=int(11.8 * GIB),
            weights_bytes=int(4.5 * GIB),
            active_bytes=0,
            reserve_bytes=GIB // 2,
            kv_budget_bytes=BUDGET,
        ),
    }


def _too_large(label: str, bytes_per_token: int) -> Rejected:
    short = bytes_per_token * SLOTS + GIB - BUDGET
    return Rejected(
        method=label.partition("8")[0],
        params={},
        label=label,
        reason="does_not_fit",
        detail=f"takes {bytes_per_token:,} bytes a token",
        short_by_bytes=short,
    )


def quantized() -> Plan:
    """Llama-3.1-8B at 128k on a 16 GB Mac: 4 bits fit, 8 and 16 do not."""
    measured = Evidence(source="measured", record_ids=("7f3a",), confidence=0.95)
    return Plan(
        **_facts(),
        decision="quantize",
        chosen=_candidate("affine4-g64", PACKED_TOKEN, 0.051, 125.0, measured),
        alternatives=(_candidate("affine4-g32", FP16_TOKEN * 10 // 32, 0.0328, 160.0, Evidence(source="analytic")),),
        rejected=(
            _too_large("fp16", FP16_TOKEN),
            Rejected(
                method="affine", params={}, label="affine5-g64", reason="not_supported_by_engine", detail="20 words"
            ),
            _too_large("affine8-g64", FP16_TOKEN * 17 // 32),
        ),
        warnings=(Note(code="quality_below_soft_floor", text="affine4-g64 diverges by 0.051 nats a token"),),
        suggestions=(Note(code="largest_context", text=f"affine8-g64 fits {EIGHT_BITS:,} tokens", value=EIGHT_BITS),),
    )


def no_fit() -> Plan:
    """The same with nothing that fits."""
    return Plan(
        **_facts(),
        decision="no_fit",
        chosen=None,
        rejected=(_too_large("fp16", FP16_TOKEN),),
        suggestions=(Note(code="smaller_weights", text="weights of 1 GiB or less would leave room"),),
    )


def fit_table() -> FitTable:
    """Contexts that are the budget over slots and bytes a token."""

    def row(label: str, bytes_per_token: int, kl: float) -> FitRow:
        cells = tuple(FitCell(slots=n, max_context_tokens=BUDGET // n // bytes_per_token) for n in (1, 2, 4, 8))
        return FitRow(method=label, params={}, label=label, bytes_per_token=bytes_per_token, kl_mean=kl, cells=cells)

    facts = _facts()
    return FitTable(
        generation=7,
        source="daemon",
        rows=(row("fp16", FP16_TOKEN, 0.0), row("affine4-g64", PACKED_TOKEN, 0.051)),
        rejected=(
            Rejected(
                method="affine", params={}, label="affine5-g64", reason="not_supported_by_engine", detail="20 words"
            ),
        ),
        hardware=facts["hardware"],
        model=facts["model"],
        workload=facts["workload"],
        engine=facts["engine"],
        budget=facts["budget"],
        max_position=131072,
        warnings=(Note(code="model_not_traced", text="the model was read from its config"),),
    )


def status() -> answers.Status:
    """A daemon that has been up for three days and four hours."""
    return answers.Status(
        server="veloxquant",
        version="0.1.0",
        protocol=1,
        pid=4312,
        uptime_s=(3 * 24 + 4) * 3600,
        generation=118,
        socket="/run/user/501/veloxquant/d.sock",
        log_file="/home/u/.local/state/veloxquant/daemon.log",
        config_path=None,
        hardware=machine(),
        methods=answers.MethodsState(ready=2, quarantined={"foo": "import failed: no module 'bar'"}),
        records=answers.RecordsState(
            directory="/records", used=842, skipped=3, scan_age_s=4, watcher="native", newest_age_s=7200
        ),
        clients=answers.ClientsState(now=3, peak=17, subscribed=0, refused=0),
        requests=answers.RequestsState(
            total=13000, by_method={"plan": 12904, "ping": 96}, errors={"timeout": 2}, p50_ms=0.11, p99_ms=0.9, slow=1
        ),
        cache=answers.CacheState(entries=40, bytes=100_000, hits=12000, misses=900),
        traces=answers.TracesState(running=1, waiting=0, done=12, failed=0),
        process=answers.ProcessState(rss_bytes=48 * 2**20, fds=14, fd_limit=8192, threads=6, engine_modules=()),
        warnings=("3 benchmark records are not used: veloxquantctl records --skipped says why",),
    )

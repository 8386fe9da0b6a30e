"""`profile` on a tiny model: what it runs, prints and writes, and what it refuses before any weight is read."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import tiny_model
from tiny_model import FLOAT_SLOT, LAYERS, NUMBERS, PACKED_SLOT

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.client import Client
from veloxquant.ctl import records_progress
from veloxquant.errors import MethodRefused
from veloxquant.measure.comparison import Comparison
from veloxquant.serve.builder import KVCacheBuilder

Run = Callable[..., Any]
PROMPT = "four score and seven"
"""Twenty bytes, so twenty tokens: 256 slots with the text."""
STORE_ONLY = ([".lock", "index.json"], ["index.json", ".lock"])
"""Files of a store without records."""
OWN, PACKED = LAYERS * 256 * FLOAT_SLOT, LAYERS * 256 * PACKED_SLOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny llama."""
    return str(tiny_model.save(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture
def profile(ctl: Run, folder: str) -> Run:
    """Run `profile` on 20 + 4 tokens without a daemon."""

    def run(*words: str) -> Any:
        return ctl("profile", "--no-daemon", "--model", folder, "--prompt", PROMPT, "--max-tokens", "4", *words)

    return run


@pytest.fixture
def told(profile: Run) -> Callable[..., dict[str, Any]]:
    """The JSON object of a run that goes well."""

    def run(*words: str) -> dict[str, Any]:
        done = profile("--json", *words)
        assert done.code == 0, done.out + done.err
        return dict(json.loads(done.out))

    return run


def test_json_says_everything(told: Callable[..., dict[str, Any]]) -> None:
    """Lengths, conditions, and for each method bytes as whole numbers, speed, text and layers."""
    value = told("--method", "affine4-g64")
    assert set(value) == TOP_LEVEL
    assert value["schema"] == "veloxquant.profile/1"
    assert (value["model_id"], value["architecture"]) == ("tiny-llama", "llama")
    assert (value["prompt_tokens"], value["max_tokens"], value["prompt"]) == (20, 4, PROMPT)
    assert value["conditions"]["backend"] in ("cpu", "metal", "cuda")
    assert (value["failures"], value["records"], value["problems"]) == ([], [], [])
    own, packed = value["runs"]
    assert [own["label"], packed["label"]] == ["fp16", "affine4-g64"]
    assert (own["resident_bytes"], packed["resident_bytes"]) == (OWN, PACKED)
    assert own["true_fp16_bytes"] == packed["true_fp16_bytes"] == LAYERS * 24 * NUMBERS * 2
    assert packed["ratio_to_fp16_run"] == pytest.approx(PACKED / OWN)
    assert value["fp16_cache_bytes"] == OWN // 2  # this model keeps 32 bits a number
    assert packed["memory_reduction"] == pytest.approx(PACKED / (OWN // 2))
    assert abs(packed["allocated_bytes"] - PACKED) <= 12 * 3 * 16384  # freed buffers may be used again, larger ones
    assert (value["generated_tokens"], packed["text_tokens"], packed["allocator_agrees"]) == (4, 4, True)
    assert packed["ratio_to_true_fp16"] == pytest.approx(PACKED / (LAYERS * 24 * NUMBERS * 2))
    assert own["same_text_as_fp16"] is True
    assert any("computes in 32 bits" in note for note in value["notes"])
    assert [layer["layer_id"] for layer in packed["report"]["layers"]] == [0, 1]
    assert packed["timeline"][-1] == [24, PACKED]


TOP_LEVEL = {
    *("schema", "model_id", "architecture", "num_parameters", "max_position", "prompt", "decision", "planned"),
    *("conditions", "prompt_tokens", "max_tokens", "generated_tokens", "fp16_cache_bytes", "process_bytes"),
    *("runs", "failures", "records", "notes", "problems"),
}
"""Fields of the answer: all of them, each once."""


def test_text_has_both_tables_and_the_comparison(profile: Run) -> None:
    """The documented table of each method, then a line for each: 2 x 256 slots of 1,024 bytes are 512 KiB."""
    done = profile("--method", "affine8-g64")
    assert done.code == 0
    assert done.out.count("Compression ratio:") == 2
    (own,) = re.findall(r"^fp16 +.*the baseline$", done.out, re.MULTILINE)
    (packed,) = re.findall(r"^affine8-g64 +.*(?:same as fp16|differs at token \d)$", done.out, re.MULTILINE)
    assert re.split(r"  +", own)[1:4] == ["512 KiB", "100.0%", f"{100 * OWN / (LAYERS * 24 * NUMBERS * 2):.1f}%"]
    assert re.split(r"  +", packed)[2] == "28.1%"  # 8 bits and two 32-bit numbers for each 64 are 9 bits of 32


def test_what_a_model_writes_moves_no_cursor(profile: Run) -> None:
    """Bytes of a random model are shown, and no control character reaches the terminal."""
    assert {one for one in profile().out if not one.isprintable()} == {"\n"}


def test_a_method_alone_means_its_defaults(told: Callable[..., dict[str, Any]]) -> None:
    """As the builder has them; a label that is named twice runs once."""
    built = KVCacheBuilder().with_method("affine").config()
    value = told("--method", "affine", "fp16", "fp16")
    assert [one["method"] for one in value["runs"]] == ["fp16", "affine"]
    assert value["runs"][1]["params"] == dict(built.params)


def test_without_a_method_the_plans_choice_runs(told: Callable[..., dict[str, Any]]) -> None:
    """The planner is asked with this prompt's length; what it chose is marked."""
    value = told()
    assert value["decision"] is not None
    assert [one["label"] for one in value["runs"] if one["planned"]] == [value["planned"]]
    assert [one["label"] for one in value["runs"]] == list(dict.fromkeys(["fp16", value["planned"]]))


def test_the_plan_joins_what_was_named(told: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """--plan adds its choice with its own prefill step, and asks for prompt and text as they will be."""
    asked = []
    plan = Client.plan

    def watched(self: Client, model: Any, **fields: Any) -> Any:
        asked.append(fields)
        return plan(self, model, **fields, methods=["affine8-g32"])

    monkeypatch.setattr(Client, "plan", watched)
    value = told("--plan", "--method", "affine4-g64", "--prefill-step", "16")
    assert asked == [{"context_length": 20, "generation_length": 4, "prefill_step_size": 16}]
    assert [one["label"] for one in value["runs"]] == ["fp16", "affine4-g64", "affine8-g32"]
    assert [one["planned"] for one in value["runs"]] == [False, False, True]
    assert {one["prefill_step_size"] for one in value["runs"]} == {16}


def test_a_failing_method_is_a_row_and_the_exit_code(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured; 1 says that one was not."""
    build = KVCacheBuilder.for_model

    def failing(model: Any, config: Any, **settings: Any) -> Any:
        if config.params.get("bits") == 4:
            raise MethodRefused("no layer can keep this", hint="another")
        return build(model, config, **settings)

    monkeypatch.setattr(KVCacheBuilder, "for_model", staticmethod(failing))
    done = profile("--method", "affine4-g64", "affine8-g64")
    assert done.code == 1
    assert "failed  affine4-g64: method_refused: no layer can keep this" in done.out
    assert re.search(r"^affine8-g64 +", done.out, re.MULTILINE)
    assert json.loads(profile("--json", "--method", "affine4-g64").out)["failures"][0]["label"] == "affine4-g64"


def test_records_are_written_on_demand(told: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """One for each method, with the bytes of this run; without --record none."""
    told("--records", str(tmp_path), "--method", "affine4-g64")
    assert BenchmarkDatabase(tmp_path).records == {}
    value = told("--records", str(tmp_path), "--method", "affine4-g64", "--record")
    kept = BenchmarkDatabase(tmp_path).records
    assert set(value["records"]) == set(kept)
    assert {one.method: one.memory_bytes for one in kept.values()} == {"fp16": OWN, "affine4-g64": PACKED}


def test_what_cannot_be_recorded_is_shown_all_the_same(
    profile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of measuring are not lost to a full disk: figures, then the error, then 1."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("veloxquant.benchmarks.folder.write_aside", full)
    done = profile("--record", "--records", str(tmp_path), "--method", "fp16")
    assert done.code == 1
    assert "the baseline" in done.out
    assert "No space left" in done.err


def test_a_refused_record_loses_no_other(profile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before and after it are on the disk; the refusal is told by its method, and the exit code says so."""
    measured = Comparison.memory_reduction
    monkeypatch.setattr(
        Comparison, "memory_reduction", lambda self, one: 4.5 if one.label == "affine6-g64" else measured(self, one)
    )
    words = ("--record", "--records", str(tmp_path), "--method", "affine6-g64", "affine8-g64", "turboquant-mse4")
    done = profile("--json", *words)
    assert done.code == 1
    kept = {one.method: one.memory_reduction for one in BenchmarkDatabase(tmp_path).records.values()}
    assert kept == {
        "fp16": 2.0,
        "affine8-g64": 0.5625,  # 9 bits of 16, as scale and bias have 32 bits here
        "turboquant-mse4": 0.28125,  # 4 bits and a norm of 32 for each 64
    }
    value = json.loads(done.out)
    assert len(value["records"]) == 3
    (problem,) = value["problems"]
    assert problem["name"] == "record_invalid"
    assert problem["message"].startswith("affine6-g64 is not recorded: memory_reduction is 4.5")
    done = profile(*words)
    assert (done.code, done.out.count("recorded  ")) == (1, 3)
    assert "error: affine6-g64 is not recorded: " in done.err


@pytest.mark.usefixtures("unloaded")
def test_a_store_that_cannot_be_written_is_told_before_weights_are_read(profile: Run, tmp_path: Path) -> None:
    """Not after minutes of measuring; without --record it does not matter."""
    (tmp_path / "records").write_text("in the way")
    done = profile("--record", "--records", str(tmp_path), "--method", "fp16")
    assert done.code != 0
    assert done.out == ""
    assert str(tmp_path / "records") in done.err
    assert "next: " in done.err


def test_a_new_store_is_made(told: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As `records import` makes it."""
    value = told("--records", str(tmp_path / "new" / "store"), "--record", "--method", "fp16")
    assert set(BenchmarkDatabase(tmp_path / "new" / "store").records) == set(value["records"])
    assert len(value["records"]) == 1


@pytest.mark.usefixtures("unloaded")
def test_a_store_that_is_not_there_is_a_slip_where_nothing_is_written(profile: Run, tmp_path: Path) -> None:
    """A file is none, whatever is asked."""
    done = profile("--records", str(tmp_path / "new"), "--method", "fp16")
    assert (done.code, "which is no folder" in done.err) == (2, True)
    (tmp_path / "file").write_text("")
    done = profile("--record", "--records", str(tmp_path / "file"), "--method", "fp16")
    assert (done.code != 0, done.out) == (True, "")
    assert not (tmp_path / "new").exists()


def test_the_prompt_comes_from_a_file_or_standard_input(
    ctl: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the very text; a byte-order mark is no part of it."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode())
    words = ("profile", "--no-daemon", "--json", "--model", folder, "--max-tokens", "1", "--method", "fp16")
    assert json.loads(ctl(*words, "--prompt-file", str(file)).out)["prompt"] == PROMPT
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PROMPT.encode())))
    value = json.loads(ctl(*words, "--prompt-file", "-").out)
    assert (value["prompt"], value["prompt_tokens"]) == (PROMPT, 20)
    assert value["runs"][0]["ms_per_token"] is None


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights fails the test."""

    def loaded(*_: Any) -> None:
        pytest.fail("the weights were read")

    monkeypatch.setattr("veloxquant.measure.loading.load_model", loaded)


REFUSED = [
    (("--method", "affin"), "no method is named 'affin'", "did you mean affine"),
    (("--method", "affine4-g63"), "no method is named 'affine4-g63'", "affine4-g64"),
    (("--prompt-file", "-"), "both was given", "--prompt"),
    (("--max-tokens", "0"), "nothing would be generated", "1 or more"),
    (("--max-tokens", "1m", "--prefill-step", "0"), "prefill_step_size is 0", ""),
    (("--html", "/"), "it is a folder", "name a file"),
    (("--html", "/nonesuch/page.html"), "there is no folder /nonesuch", "name a file"),
    (("--html", ""), "no path", "name a file"),
    (("--html", "/dev/null"), "it is no file", "name a file"),
    (("--html", "x" * 300 + "/p"), "cannot be written", "name a file"),
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(("words", "message", "hint"), REFUSED)
def test_what_is_wrong_is_refused_before_weights_are_read(
    profile: Run, words: tuple[str, ...], message: str, hint: str
) -> None:
    """Usage errors: 2, a sentence, what to do next."""
    done = profile(*words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert hint in done.err


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "."), "and neither was given"),
        (("--model", ".", "--prompt", " \n"), "the prompt is empty"),
        (("--model", ".", "--prompt-file", "nonesuch.txt"), "nonesuch.txt cannot be read: No such file"),
        (("--model", ".", "--prompt-file", "."), ". cannot be read: Is a directory"),
        (("--model", "nobody/nothing", "--prompt", "x"), "nobody/nothing is not in the local hub cache"),
        (("--model", "./nonesuch", "--prompt", "x"), "no model folder"),
        (("--prompt", "x"), "--model"),
    ],
)
def test_what_is_missing_is_told(
    ctl: Run, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt, file, model: each has its sentence."""
    monkeypatch.chdir(tmp_path)
    done = ctl("profile", "--no-daemon", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.usefixtures("unloaded")
def test_a_prompt_that_is_no_text_is_refused(ctl: Run, folder: str, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 name the file."""
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    done = ctl("profile", "--no-daemon", "--model", folder, "--prompt-file", str(tmp_path / "image"))
    assert done.code == 2
    assert "is not text in UTF-8" in done.err


@pytest.mark.usefixtures("unloaded")
def test_a_disabled_method_is_not_run(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration's word counts here, too."""
    monkeypatch.setenv("VELOXQUANT_METHODS_DISABLED", "affine")
    done = profile("--method", "affine4-g64")
    assert done.code == 2
    done = profile("--method", "affine")
    assert (done.code, "affine is disabled in the configuration" in done.err) == (2, True)


def test_an_interrupt_leaves_nothing_behind(profile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C in the second method: 130, no page, no record, no temporary file."""
    generate = __import__("mlx_lm").stream_generate
    calls: list[int] = []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return generate(*arguments, **settings)

    monkeypatch.setattr("mlx_lm.stream_generate", interrupted)
    words = ("--record", "--records", str(tmp_path), "--html", str(tmp_path / "page.html"))
    done = profile("--method", "affine4-g64", *words)
    assert (done.code, done.out) == (130, "")
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] in STORE_ONLY
    assert BenchmarkDatabase(tmp_path).records == {}


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_sees_a_bar_with_the_method_at_work(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names each method in turn, and is gone at the end."""
    screen = _Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(records_progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(records_progress, "_PAUSE_S", 0.0)
    assert profile("--method", "affine4-g64").code == 0
    drawn = screen.getvalue()
    assert "profiling [" in drawn
    assert drawn.index("] ") < drawn.index(" fp16") < drawn.index(" affine4-g64")
    assert "profiling" not in drawn.rpartition("\r\033[K")[2]


def test_what_libraries_print_is_not_in_the_answer(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm prints warnings to standard output; JSON stays one object."""
    load = __import__("veloxquant.measure.loading", fromlist=["load_model"]).load_model

    def chatty(source: Any) -> Any:
        sys.stdout.write("[WARNING] close to the limit\n")
        return load(source)

    monkeypatch.setattr("veloxquant.measure.loading.load_model", chatty)
    done = profile("--json", "--method", "fp16")
    assert json.loads(done.out)["schema"] == "veloxquant.profile/1"
    assert "close to the limit" in done.err

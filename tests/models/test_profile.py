"""The profile of a model from end to end: kept, traced, or static and said so."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from veloxquant.errors import EngineUnavailable, ModelConfigInvalid, ModelNotSupported
from veloxquant.models import profile as profiles
from veloxquant.models.exchange import Failed
from veloxquant.models.resolve import ModelSource, resolve
from veloxquant.models.trace import Trace
from veloxquant.models.trace_worker import engine, heads, layers, parameters, tracing
from veloxquant.profiles import CacheLayer, CachePart, ModelProfile

if TYPE_CHECKING:
    from pathlib import Path

PROBES = [{"method": "q", "label": "q8", "params": {"bits": 8, "group": 32}}]


def ask(source: ModelSource, cache_dir: Path | None = None, *, fingerprint: str = "f") -> ModelProfile:
    """A profile with one probe of the stand-in factory."""
    return profiles.profile(
        source, probes=PROBES, factory="engine_factory:quantized", fingerprint=fingerprint, cache_dir=cache_dir
    )


def kept(source: ModelSource, cache_dir: Path, *, fingerprint: str = "f") -> ModelProfile | None:
    """What is kept for the same question."""
    return profiles.cached(source, probes=PROBES, fingerprint=fingerprint, cache_dir=cache_dir)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answer every trace in this process instead of a worker; gathers the requests."""
    asked: list[Any] = []

    def answer(request: Any, *, timeout_s: float) -> Trace:
        asked.append(request)
        layers = (CacheLayer(index=0, engine_class="KVCache", parts=(CachePart(kind="kv", engine_class="KVCache"),)),)
        return Trace(
            profile=ModelProfile(
                model_id=request.model_id,
                source="traced",
                layers=layers,
                num_parameters=1000,
                weights_bytes=2000,
                weights_source="traced",
                read_bytes_per_token=500,
            )
        )

    monkeypatch.setattr(profiles, "trace", answer)
    return asked


def test_a_model_is_traced_once_by_a_real_worker(factories: None, tiny: dict[str, Any], tmp_path: Path) -> None:
    """Two callers at once, then a third from the kept file: all the same, and it equals the trace in this process."""
    source = resolve(config=tiny, config_model_id="tiny")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ask(source, tmp_path), range(2))
    assert first == second == kept(source, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert first.layers == tracing.trace(tiny, "float16").layers
    assert (first.model_id, first.source, first.confidence, first.dtype) == ("tiny", "traced", 1.0, "float16")
    assert first.engine_version == profiles.engine_version()
    assert first.config_hash == source.config_hash
    assert first.probes[0].packed == (0, 1, 2, 3)


@pytest.mark.usefixtures("traces")
def test_a_kept_profile_belongs_to_one_question(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Another method set, config, number format, engine or schema asks anew; another label does not."""
    source = resolve(config=tiny)
    ask(source, tmp_path)
    assert kept(source, tmp_path) is not None
    assert kept(resolve(config=tiny, config_model_id="renamed"), tmp_path) is not None
    assert kept(source, tmp_path, fingerprint="other") is None
    assert kept(resolve(config={**tiny, "vocab_size": 1001}), tmp_path) is None
    assert kept(resolve(config={**tiny, "torch_dtype": "float32"}), tmp_path) is None


@pytest.mark.parametrize("what", ["engine_version", "TRACE_SCHEMA"])
@pytest.mark.usefixtures("traces")
def test_another_engine_or_schema_asks_anew(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A profile of one engine says nothing about the next."""
    source = resolve(config=tiny)
    ask(source, tmp_path)
    monkeypatch.setattr(profiles, what, (lambda: "99") if what == "engine_version" else 99)
    assert kept(source, tmp_path) is None


def test_weights_that_are_given_win_over_parameter_shapes(traces: list[Any], tiny: dict[str, Any]) -> None:
    """Bytes read for a token scale with them: a quarter of the weights stays a quarter."""
    found = ask(resolve(config=tiny, weights_bytes=500))
    assert (found.weights_bytes, found.weights_source, found.read_bytes_per_token) == (500, "given", 125)
    assert found.weight_bits == 500 * 8 / 1000
    shapes = ask(resolve(config=tiny))
    assert (shapes.weights_bytes, shapes.weights_source, shapes.weight_bits) == (2000, "traced", 16)


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(
    traces: list[Any], tiny: dict[str, Any], tmp_path: Path
) -> None:
    """The profile is answered all the same."""
    (tmp_path / "file").write_bytes(b"")
    assert ask(resolve(config=tiny), tmp_path / "file" / "below").source == "traced"
    assert ask(resolve(config=tiny), None).source == "traced"


def test_an_unknown_type_is_refused_by_name(tiny: dict[str, Any]) -> None:
    """Through the real worker, with close names as a hint, although all fields of a llama are there."""
    with pytest.raises(ModelNotSupported, match="'lama'") as error:
        ask(resolve(config={**tiny, "model_type": "lama"}))
    assert "llama" in error.value.hint
    assert error.value.field == "model.config"


def test_what_lies_beside_the_engines_models_is_no_hint(tiny: dict[str, Any]) -> None:
    """`cache` and `switch_layers` are files of its folder of models and make none."""
    for name in ("cache", "switch_layer", "rope_util"):
        with pytest.raises(ModelNotSupported, match=f"'{name}'") as error:
            ask(resolve(config={**tiny, "model_type": name}))
        assert "did you mean" not in error.value.hint
        assert "pip install --upgrade mlx-lm" in error.value.hint


def test_a_type_that_is_no_name_is_refused_with_a_way_out(tiny: dict[str, Any]) -> None:
    """Nothing is looked up for it."""
    with pytest.raises(ModelNotSupported, match=r"'../../x' is no name") as error:
        ask(resolve(config={**tiny, "model_type": "../../x"}))
    assert "model_type of the checkpoint's own config.json" in error.value.hint


def test_missing_fields_are_named(tiny: dict[str, Any]) -> None:
    """Through the real worker: the engine's own list."""
    del tiny["rms_norm_eps"], tiny["vocab_size"]
    with pytest.raises(ModelConfigInvalid, match=r"(?=.*rms_norm_eps)(?=.*vocab_size)") as error:
        ask(resolve(config=tiny))
    assert error.value.field == "model.config"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model_file": "evil.py"}, r"a Python file of its own \('evil.py'\), which is never done"),
        ({"model_file": ""}, "a Python file of its own"),
        ({"trust_remote_code": True}, "asks to trust code that comes with the model, which is never done"),
    ],
)
def test_a_config_that_asks_to_run_its_own_code_is_refused(
    tiny: dict[str, Any], tmp_path: Path, asked: dict[str, Any], says: str
) -> None:
    """Inline or in a folder, before anything else is looked at; the file is there and is not run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "config.json").write_text(json.dumps(tiny | asked))
    for named in ({"config": tiny | asked}, {"path": str(tmp_path)}):
        with pytest.raises(ModelNotSupported, match=says) as error:
            resolve(**named)
        assert error.value.field == "model.config"
        assert "whose architecture mlx-lm has" in error.value.hint


def test_code_that_a_config_only_names_is_not_run_and_said_to_be_there(tiny: dict[str, Any], traces: list[Any]) -> None:
    """mlx-lm does not look at an auto_map, and has classes of its own for most models that have one."""
    named = {**tiny, "auto_map": {"AutoModel": "evil.Model"}}
    assert len(tracing.trace(named, "float16").layers) == 4
    assert ask(resolve(config=named)).notes == ("the config names Python code of its own (auto_map); it is never run",)


def test_a_model_that_only_its_own_code_knows_is_refused(tiny: dict[str, Any]) -> None:
    """The engine has no such class, and where one is named it is not fetched."""
    named = {**tiny, "model_type": "mystery", "auto_map": {"AutoModel": "evil.Model"}}
    with pytest.raises(ModelNotSupported, match="'mystery'") as error:
        ask(resolve(config=named))
    assert error.value.hint.startswith("the config names Python code of its own (auto_map); it is never run; ")


@pytest.mark.parametrize("died", ["was killed by SIGSEGV", "was ended after 20 s"])
def test_when_the_worker_dies_the_static_reader_answers_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any], tmp_path: Path, died: str
) -> None:
    """With the reason in the notes, a lower confidence, and nothing kept for later."""
    monkeypatch.setattr(profiles, "trace", lambda *_, **__: Trace(died=died))
    found = ask(resolve(config=tiny), tmp_path)
    assert found.source == "static"
    assert found.notes[0].startswith(f"the trace {died}: ask again")
    assert "trace.timeout_s" in found.notes[0]
    assert found.layers == tracing.trace(tiny, "float16").layers
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelNotSupported, match=f"{died}.*'gemma4'") as caught:
        ask(resolve(config={"model_type": "gemma4"}))
    assert "trace.timeout_s" in caught.value.hint


def test_without_the_engine_the_static_reader_answers_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]
) -> None:
    """Not installed, or installed and not importable; what the table does not know needs the engine."""
    monkeypatch.setattr(profiles, "engine_version", lambda: None)
    assert ask(resolve(config=tiny)).notes[0] == "mlx-lm is not installed: pip install mlx-lm"
    with pytest.raises(EngineUnavailable, match="'kimi_k3'") as error:
        ask(resolve(config={"model_type": "kimi_k3"}))
    assert (error.value.hint, error.value.field) == ("pip install mlx-lm", "model.config")


def test_an_engine_that_cannot_be_imported_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Through the real worker, with the import blocked."""
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("raise ImportError('blocked')")
    monkeypatch.syspath_prepend(tmp_path)
    found = ask(resolve(config=tiny))
    assert (found.source, found.notes[0]) == ("static", "mlx-lm cannot be imported: blocked: pip install mlx-lm")


def test_an_engine_older_than_the_family_counts_as_not_asked(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]
) -> None:
    """The table knows llama; an engine that does not is too old to ask."""
    refusal = Failed(kind="not_supported", message="the installed mlx-lm has no model_type 'llama'")
    monkeypatch.setattr(profiles, "trace", lambda *_, **__: Trace(failed=refusal))
    assert ask(resolve(config=tiny)).source == "static"


def test_an_assumed_number_format_is_said(traces: list[Any], tiny: dict[str, Any]) -> None:
    """And passed to the trace."""
    del tiny["torch_dtype"]
    assert "bfloat16 is assumed" in ask(resolve(config=tiny)).notes[0]
    assert traces[0].dtype == "bfloat16"


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_a_quantized_config_follow_from_shapes(llama_8b: dict[str, Any], bits: int) -> None:
    """Llama-3.1-8B in groups of 64: every matrix bits + 2 x 16 / 64 a number, 65 norms of 4096 stay 16 bit."""
    found = tracing.trace({**llama_8b, "quantization": {"group_size": 64, "bits": bits}}, "bfloat16")
    norms = 65 * 4096
    assert found.weights_bytes == (8_030_261_248 - norms) * (bits * 2 + 1) // 16 + 2 * norms
    assert found.num_parameters == 8_030_261_248


def test_single_modules_may_be_packed_otherwise(llama_8b: dict[str, Any]) -> None:
    """mlx-lm writes exceptions by path: an output head left in 16 bit costs 11.5 bits a number more."""
    plain = {"group_size": 64, "bits": 4}
    packed = tracing.trace({**llama_8b, "quantization": plain}, "bfloat16").weights_bytes
    spared = tracing.trace({**llama_8b, "quantization": {**plain, "lm_head": False}}, "bfloat16").weights_bytes
    assert packed is not None
    assert spared is not None
    assert spared - packed == 128256 * 4096 * 23 // 16


def test_one_row_of_an_untied_embedding_is_read_for_a_token(llama_8b: dict[str, Any]) -> None:
    """Llama-3.1-8B reads all weights but 128255 rows of its input table; tied, it would read them all."""
    found = tracing.trace(llama_8b, "bfloat16")
    assert found.read_bytes_per_token == 2 * (8_030_261_248 - 128255 * 4096)
    tied = tracing.trace({**llama_8b, "tie_word_embeddings": True}, "bfloat16")
    assert tied.read_bytes_per_token == tied.weights_bytes


def test_unselected_experts_are_not_read(tiny: dict[str, Any]) -> None:
    """Mixtral with 8 experts of which 2 answer: three matrices of 128 x 256 for each of 6 idle experts and 4 layers."""
    moe = {**tiny, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4}
    found = tracing.trace(moe, "float16")
    assert found.num_parameters is not None
    assert found.active_parameters == found.num_parameters - 4 * 6 * 3 * 128 * 256


@pytest.mark.parametrize(
    "foreign",
    [
        {"quant_method": "awq"},
        {"quant_method": "gptq", "bits": 4, "group_size": 64},  # leaves embedding and output head alone
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_packing_that_only_the_files_can_tell_is_said(tiny: dict[str, Any], foreign: dict[str, Any]) -> None:
    """No bytes rather than wrong bytes; mlx-lm looks into text_config too."""
    for config in ({"quantization_config": foreign}, {"text_config": {"quantization_config": foreign}}):
        found = tracing.trace({**tiny, **config}, "float16")
        assert found.weights_bytes is None
        assert repr(foreign["quant_method"]) in found.weights_source


@pytest.mark.parametrize("scales", [{}, {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}])
def test_8_bit_floats_weigh_what_the_engine_makes_of_them(
    tiny: dict[str, Any], tmp_path: Path, scales: dict[str, Any]
) -> None:
    """An fp8 checkpoint is widened when it is loaded: 16 bits a parameter, and not the bytes of its file."""
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny, "quantization_config": {"quant_method": "fp8", **scales}})
    )
    header = b'{"a":{"dtype":"F8_E4M3","shape":[64],"data_offsets":[0,64]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    found = ask(resolve(path=str(tmp_path)))
    assert found.num_parameters is not None
    assert (found.weights_bytes, found.weight_bits) == (2 * found.num_parameters, 16)
    assert any("widens" in note for note in found.notes)


def test_8_bit_floats_without_the_engine_count_twice(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """The static reader knows no shapes: 64 numbers of 8 bits become 16; those that stay packed count as they are."""
    monkeypatch.setattr(profiles, "engine_version", lambda: None)
    header = b'{"a":{"dtype":"F8_E4M3","shape":[64],"data_offsets":[0,64]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    for scales, held in (({}, 128), ({"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, 64)):
        config = {**tiny, "quantization_config": {"quant_method": "fp8", **scales}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert ask(resolve(path=str(tmp_path))).weights_bytes == held


@pytest.mark.parametrize(
    "absurd",
    [
        {"hidden_size": 2**30, "vocab_size": 2**30, "head_dim": 32},
        {"model_type": "mixtral", "rope_theta": 1e4, "num_local_experts": 2**31 - 1, "hidden_size": 2**20},
    ],
)
def test_a_model_larger_than_any_is_invalid(tiny: dict[str, Any], absurd: dict[str, Any]) -> None:
    """Its bytes would overflow what MLX counts in, and come out small."""
    with pytest.raises(engine.EngineRefused, match="parameters, and none has more than") as refused:
        tracing.trace({**tiny, "num_experts_per_tok": 2, "intermediate_size": 2**20, **absurd}, "float32")
    assert refused.value.kind == "config_invalid"


def test_watching_leaves_the_engine_as_it_was() -> None:
    """Also when the watched call fails."""
    from mlx import nn
    from mlx_lm.models import cache

    def found() -> tuple[Any, ...]:
        updates = (getattr(cache, name).update_and_fetch for name in heads.CLASSES)
        return nn.Embedding.__call__, nn.Embedding.as_linear, mx.fast.scaled_dot_product_attention, *updates

    def fail() -> None:
        with parameters.watching(), heads.noting():
            raise LookupError

    before = found()
    with pytest.raises(LookupError):
        fail()
    assert found() == before


@pytest.mark.parametrize(("name", "blocks", "shared", "caches"), [("gemma4", 10, 4, 6), ("gemma3n", 4, 2, 2)])
def test_shared_layers_are_those_without_keys_of_their_own(
    recorded: dict[str, dict[str, Any]], name: str, blocks: int, shared: int, caches: int
) -> None:
    """The last blocks of these attend to K and V of earlier ones."""
    found = tracing.trace(recorded[f"{name}-0"]["config"], "float16")
    assert (found.num_layers, found.shared_layers, len(found.layers)) == (blocks, shared, caches)


def test_blocks_without_attention_share_nothing(published: dict[str, dict[str, Any]]) -> None:
    """31 of Nemotron-Super-49B's 80 blocks have no attention; that is a note, not sharing."""
    found = tracing.trace(published["nvidia/Llama-3_3-Nemotron-Super-49B-v1"]["config"], "bfloat16")
    assert (found.num_layers, found.shared_layers, len(found.layers)) == (80, 0, 49)
    assert found.notes == ("31 blocks have no attention and hold no cache",)


def test_importing_the_room_imports_no_engine() -> None:
    """A daemon that plans from kept profiles never loads mlx, mlx_lm, transformers or torch."""
    code = (
        "import sys, veloxquant.models.profile, veloxquant.models.resolve, veloxquant.models.trace\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'torch', 'numpy'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "[]\n"


def test_a_cache_class_of_the_models_own_is_refused_by_name() -> None:
    """deepseek_v41 keeps windows, closed groups and pending rows in one object; no rule covers it."""
    with pytest.raises(engine.EngineRefused, match=r"mlx_lm\.models\.deepseek_v41\.LayerCache") as refused:
        tracing.trace({"model_type": "deepseek_v41"}, "bfloat16")
    assert refused.value.kind == "not_supported"


def test_a_state_that_grows_is_not_taken_for_a_constant() -> None:
    """Bytes after the prompt and after the single steps must be the same."""
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 32))
    with pytest.raises(engine.EngineRefused, match="layer 0 changes its size"):
        layers.read([state], [1 * 24 * 4], {}, {})
    assert layers.read([state], [1 * 32 * 4], {}, {})[0].parts[0].state_bytes == 128


def test_a_cache_that_breaks_its_rule_is_refused_with_both_figures() -> None:
    """A KVCache that was written otherwise than a trace writes: 512 slots where 256 are ruled."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 300, 4)), mx.zeros((1, 1, 300, 4)))
    with pytest.raises(engine.EngineRefused, match=f"holds {512 * 32} bytes where its rule gives {256 * 32}"):
        layers.read([cache], [0], {}, {})


def test_a_model_without_layers_is_invalid() -> None:
    """There is nothing to plan for."""
    with pytest.raises(engine.EngineRefused, match="without layers"):
        layers.read([], [], {}, {})


def eight_bits_at_the_end(path: str, _: Any) -> bool | dict[str, Any]:
    """A mixed recipe: the last projection of each block at 8 bits, the rest as asked."""
    return {"group_size": 32, "bits": 8, "mode": "affine"} if "down_proj" in path else True


@pytest.mark.parametrize(
    ("how", "recipe"),
    [
        ({"bits": 4, "group_size": 64}, None),
        ({"bits": 8, "group_size": 64}, None),
        ({"bits": 4, "group_size": 64}, eight_bits_at_the_end),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, None),
    ],
)
def test_a_checkpoint_quantized_by_the_engine_weighs_what_shapes_say(
    tiny: dict[str, Any], tmp_path: Path, how: dict[str, Any], recipe: Any
) -> None:
    """mlx-lm quantizes and saves a model; its files hold the bytes that the trace finds without any file."""
    from mlx_lm.utils import quantize_model, save_config, save_model

    model, config = quantize_model(engine.build(tiny, "float16"), tiny, quant_predicate=recipe, **how)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    source = resolve(path=str(tmp_path))
    assert source.weights is not None
    assert (source.weights.dtype, source.weights.quantized) == ("float16", True)
    assert source.weights.weights_bytes == tracing.trace(source.config, "float16").weights_bytes

"""The composition root: what it gives each room, and what it refuses before a plan is made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant import local, views
from veloxquant._fallback import LocalPlanner
from veloxquant.config import Config, load
from veloxquant.errors import EngineUnavailable, InvalidParams, MethodNotFound, ModelNotFound, StoreUnavailable
from veloxquant.methods.plugin import Quarantined
from veloxquant.methods.registry import Loaded
from veloxquant.planner.snapshot import NoRecords
from veloxquant.profiles import CacheLayer, CachePart, HardwareProfile, ModelProfile
from veloxquant.wire.messages import FitParams, MethodsParams, PlanParams, convert_params

if TYPE_CHECKING:
    from pathlib import Path

MAC = HardwareProfile(chip="Apple M2", generation=2, tier="base", gpu_cores=10, total_memory_bytes=16 * 2**30)


def asked(**params: Any) -> PlanParams:
    """Typed params of a plan for a llama, which no test here traces."""
    typed = convert_params("plan", {"model": {"config": {"model_type": "llama"}}, **params})
    assert isinstance(typed, PlanParams)
    return typed


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The installed methods, and one that is fenced off."""
    from veloxquant.methods import registry

    found = registry.load()
    fenced = Quarantined("foo", "veloxquant-foo", "import failed")
    return Loaded(found.methods, found.variants, (*found.quarantined, fenced), found.fingerprint, found.sources)


@pytest.fixture
def world(loaded: Loaded) -> local.World:
    """A Mac without records."""
    return local.open_world(Config(), hardware=MAC, records=NoRecords(), loaded=loaded)


PROFILE = ModelProfile(model_id="tiny", engine_version="0.32.2")


def test_a_world_holds_what_it_is_given(loaded: Loaded) -> None:
    """Generation, source, machine and reserve go into the snapshot as they are."""
    config = load(flags={"planner.reserve_bytes": "1GiB"})
    made = local.open_world(config, generation=7, source="daemon", hardware=MAC, records=NoRecords(), loaded=loaded)
    shot = made.snapshot
    assert (shot.generation, shot.source, shot.hardware, shot.reserve_bytes) == (7, "daemon", MAC, 2**30)
    assert {offer.method.name for offer in shot.offers} == {method.name for method in loaded.methods}
    assert shot.calibrations == {}
    assert [(one.name, one.reason) for one in shot.quarantined] == [("foo", "import failed")]


def test_a_disabled_method_is_not_offered_and_says_so(loaded: Loaded) -> None:
    """It stays known by name, with the reason."""
    config = load(flags={"methods.disabled": ["affine"]})
    made = local.open_world(config, hardware=MAC, records=NoRecords(), loaded=loaded)
    assert {offer.method.name for offer in made.snapshot.offers} == {one.name for one in loaded.methods} - {"affine"}
    assert ("affine", "disabled in the configuration") in [(q.name, q.reason) for q in made.snapshot.quarantined]
    listed = views.methods(convert_params("methods", {"name": "affine"}), made).methods
    assert [(row.state, row.reason) for row in listed] == [("quarantined", "disabled in the configuration")]


def test_unreadable_records_are_done_without(
    short_folder: Path, loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the directory should be costs the records, not the plan, and is logged."""
    (short_folder / "file").write_text("")
    config = load(flags={"records.directory": str(short_folder / "file")})
    with caplog.at_level(logging.WARNING):
        made = local.open_world(config, hardware=MAC, loaded=loaded)
    assert isinstance(made.snapshot.records, NoRecords)
    assert "planning without records" in caplog.text


def test_overrides_make_another_machine(world: local.World) -> None:
    """Without overrides the snapshot's machine stands; with them the request has its own."""
    assert local.request(asked(), PROFILE, world).hardware is None
    other = local.request(asked(hardware={"working_set_bytes": 2**33}), PROFILE, world).hardware
    assert other is not None
    assert (other.working_set_bytes, other.chip) == (2**33, "Apple M2")


def test_the_engine_is_the_installed_one(world: local.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version is refused naming both, and so is any when mlx-lm is missing; none asked is none refused."""
    monkeypatch.setattr("veloxquant.models.profile.engine_version", lambda: "0.32.2")
    assert local.request(asked(engine={"name": "mlx-lm"}), PROFILE, world).engine_version == "0.32.2"
    assert local.request(asked(engine={"version": "0.32.2"}), PROFILE, world).engine_version == "0.32.2"
    with pytest.raises(EngineUnavailable, match=r"0\.31\.0 was asked for and mlx-lm 0\.32\.2 is installed") as caught:
        local.request(asked(engine={"version": "0.31.0"}), PROFILE, world)
    assert caught.value.field == "engine.version"
    assert "mlx-lm==0.31.0" in caught.value.hint
    monkeypatch.setattr("veloxquant.models.profile.engine_version", lambda: None)
    with pytest.raises(EngineUnavailable, match="no mlx-lm is installed"):
        local.request(asked(engine={"name": "mlx-lm"}), PROFILE, world)
    assert local.request(asked(), PROFILE, world).engine_version == "0.32.2"


@pytest.mark.parametrize("name", ["affine", "fp16", "affine4-g64", "foo"])
def test_names_that_exist_are_taken(world: local.World, name: str) -> None:
    """A method, a variant's label, and a fenced method, whose reason the plan then gives."""
    assert local.request(asked(methods=[name]), PROFILE, world).methods == (name,)


@pytest.mark.parametrize(("name", "hint"), [("afine", "affine"), ("affine4-64", "affine4-g64"), ("fo", "foo")])
def test_names_that_do_not_exist_are_refused(world: local.World, name: str, hint: str) -> None:
    """With the name that comes close."""
    with pytest.raises(MethodNotFound) as caught:
        local.request(asked(methods=[name]), PROFILE, world)
    assert hint in caught.value.hint
    assert caught.value.field == "methods"


def test_a_mistake_in_a_method_of_ours_costs_that_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made from the others and says what was wrong; so do the methods that failed in use."""
    from veloxquant.methods import registry
    from veloxquant.planner.plan import plan

    part = CachePart(
        kind="kv", engine_class="KVCache", heads=2, key_width=64, value_width=64, key_itemsize=2, value_itemsize=2
    )
    layers = tuple(CacheLayer(index=index, engine_class="KVCache", parts=(part,)) for index in range(2))
    profile = ModelProfile(model_id="tiny", num_layers=2, layers=layers, weights_bytes=2**20)
    world = local.open_world(Config(), hardware=MAC, records=NoRecords(), loaded=registry.load())

    def broken(*_question: Any) -> float:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("veloxquant_plugins.affine.Affine.key_bits", broken)
    made = plan(local.request(asked(), profile, world), world.snapshot)
    assert made.chosen is not None
    assert made.chosen.label == "fp16"
    said = {one.detail for one in made.rejected if one.reason == "quarantined"}
    assert "method affine: key_bits() failed: ZeroDivisionError: oh" in said
    assert [(one.name, one.distribution) for one in world.loaded.tripped()] == [("affine", "veloxquant")]


def test_a_trace_is_bounded_and_kept_where_the_configuration_says(
    short_folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits, folder, method set and the dotted name of the factory reach the models room."""
    given: dict[str, Any] = {}

    def record(source: Any, **settings: Any) -> ModelProfile:
        given.update(settings)
        return PROFILE

    monkeypatch.setattr("veloxquant.models.profile.profile", record)
    config = load(flags={"trace.cache_directory": str(short_folder / "t"), "trace.timeout_s": "5s"})
    world = local.open_world(config, hardware=MAC, records=NoRecords(), loaded=loaded)
    assert local.trace_profile(local.model_source(asked()), world) is PROFILE
    assert given == {
        "probes": loaded.probes(),
        "factory": "veloxquant.methods.worker:load",
        "fingerprint": loaded.fingerprint,
        "cache_dir": short_folder / "t",
        "timeout_s": 5.0,
        "memory_limit_bytes": 2 * 2**30,
        "calibration": None,
        "tried": loaded.stamps or None,
    }


def test_a_fallback_plans_within_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace gets what is left of the caller's limit, and never more than the configuration allows."""
    seen: list[float] = []

    def open_world(config: Config, **_settings: Any) -> Any:
        seen.append(config.trace.timeout_s)
        raise ModelNotFound("far enough")

    monkeypatch.setattr(local, "open_world", open_world)
    for left_s in (3.5, 300.0):
        with pytest.raises(ModelNotFound):
            LocalPlanner(Config()).answer("plan", {"model": {"id": "a/b"}}, left_s)
    assert seen == [3.5, 20.0]


def test_a_fallback_checks_params_as_the_daemon_does() -> None:
    """The same refusal, field and all."""
    with pytest.raises(InvalidParams) as caught:
        LocalPlanner(Config()).answer("plan", {"model": {"id": "a/b"}, "workload": {"objective": "speed"}}, 5.0)
    assert caught.value.field == "workload.objective"


def test_a_fallback_reads_records_only_to_plan(short_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What does not rest on records neither reads them nor warns that it cannot."""
    (short_folder / "file").write_text("")
    planner = LocalPlanner(load(flags={"records.directory": str(short_folder / "file")}))
    planner.answer("methods", {}, 30.0)
    planner.answer("hardware", {}, 30.0)
    with pytest.raises(StoreUnavailable):
        planner.answer("records", {}, 30.0)
    assert caplog.text == ""


def test_a_fallback_shows_the_records(short_folder: Path) -> None:
    """Records are read from the directory itself, the skipped ones with their reasons."""
    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

    directory = short_folder / "records"
    database = BenchmarkDatabase(directory)
    database.add(method="fp16", model_id="tiny", context_length=4096, memory_bytes=5, throughput_tok_s=2.0, chip="M2")
    database.close()
    (directory / "records" / "bad.json").write_text("{")
    planner = LocalPlanner(load(flags={"records.directory": str(directory)}))
    page = planner.answer("records", {"skipped": True}, 5.0)
    assert [(one["method"], one["model_id"]) for one in page.records] == [("fp16", "tiny")]
    assert (page.total, page.skipped_total) == (1, 1)
    assert page.skipped[0].file.endswith("bad.json")
    assert planner.answer("records", {"method": "affine4-g64"}, 5.0).total == 0


TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
}


def test_a_model_is_traced_once_for_all_answers(
    short_folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trace is kept where the configuration says, and read from there: 2 layers x 2 heads x 2 x 32 x 2 bytes."""
    config = load(flags={"trace.cache_directory": str(short_folder / "traces")})
    only = tuple(pair for pair in loaded.variants if pair[1].label == "fp16")
    own = Loaded(tuple(method for method, _ in only), only, (), "own")
    mac = msgspec.structs.replace(MAC, working_set_bytes=11 * 2**30)
    world = local.open_world(config, hardware=mac, records=NoRecords(), loaded=own)
    params = asked(model={"config": TINY, "weights_bytes": 10**6}, workload={"context_length": 1000})
    made = local.plan(params, world)
    assert made.chosen is not None
    assert (made.chosen.label, made.chosen.memory.bytes_per_token) == ("fp16", 512)
    assert "trace_not_kept" not in {note.code for note in made.warnings}
    monkeypatch.setattr(local.models_profile, "profile", lambda *_a, **_k: pytest.fail("it was traced again"))
    typed = convert_params("fit", {"model": {"config": TINY, "weights_bytes": 10**6}})
    assert isinstance(typed, FitParams)
    assert [row.label for row in local.fit(typed, world).rows] == ["fp16"]


def test_a_trace_that_no_disk_keeps_says_so(
    short_folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folder, what is wrong with it, and the ways out; a folder that takes it is made, and left empty."""
    traced = ModelProfile(model_id="tiny", source="traced")
    monkeypatch.setattr("veloxquant.models.profile.profile", lambda *_a, **_k: traced)

    def unkept(folder: Path) -> str | None:
        config = load(flags={"trace.cache_directory": str(folder)})
        world = local.open_world(config, hardware=MAC, records=NoRecords(), loaded=loaded)
        return local.trace_profile(local.model_source(asked()), world).unkept

    assert unkept(short_folder / "new" / "traces") is None
    assert list((short_folder / "new" / "traces").iterdir()) == []
    (short_folder / "file").write_text("")
    why = str(unkept(short_folder / "file"))
    assert why.startswith(f"traced models cannot be kept in {short_folder / 'file'} (File exists)")
    assert "set trace.cache_directory" in why


def test_calibrations_that_cannot_be_read_are_done_without(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is named in the log: a folder that leads nowhere, one that is no folder, a file that is broken."""
    assert local.read_calibrations(load(flags={"records.directory": str(short_folder)})) == {}
    assert caplog.text == ""
    folder = short_folder / "calibrations"
    folder.write_text("")
    assert local.read_calibrations(load(flags={"records.directory": str(short_folder)})) == {}
    assert f"the calibrations in {folder} cannot be read: Not a directory" in caplog.text
    folder.unlink()
    folder.mkdir(mode=0o700)
    (folder / "m-0123456789abcdef.json").write_text("{")
    (folder / "m-0123456789abcdef.json").chmod(0o600)
    assert local.read_calibrations(load(flags={"records.directory": str(short_folder)})) == {}
    assert f"the calibration {folder / 'm-0123456789abcdef.json'} is not used: " in caplog.text


def test_a_methods_name_that_nobody_has_is_refused(world: local.World) -> None:
    """As in a plan, with those that there are."""
    typed = convert_params("methods", {"name": "fp61"})
    assert isinstance(typed, MethodsParams)
    with pytest.raises(MethodNotFound, match="fp61") as caught:
        views.methods(typed, world)
    assert (caught.value.field, "fp16" in caught.value.hint) == ("name", True)

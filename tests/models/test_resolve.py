"""Finding a model: folders, the local hub cache, inline configs; every wrong input has a typed error and a field."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import InvalidParams, ModelConfigInvalid, ModelError, ModelNotFound
from veloxquant.models.resolve import MAX_CONFIG_BYTES, MAX_VALUES, compute_dtype, config_hash, resolve

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a config and no weights."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "my-model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two snapshots of org/name, the second named by refs/main."""
    home = tmp_path / "hub" / "models--org--name"
    for revision, size in (("a" * 40, 1), ("b" * 40, 2)):
        (home / "snapshots" / revision).mkdir(parents=True)
        (home / "snapshots" / revision / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": size}))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("b" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return home


def test_a_folder_is_named_after_itself(folder: Path) -> None:
    """Config, its hash and the folder's name."""
    source = resolve(path=str(folder))
    assert (source.model_id, source.config, source.path) == ("my-model", CONFIG, str(folder))
    assert source.config_hash == config_hash(CONFIG)
    assert source.weights is None


def test_the_hash_does_not_depend_on_the_order_of_fields() -> None:
    """Two files with the same fields are the same model."""
    assert config_hash(CONFIG) == config_hash(dict(reversed(CONFIG.items())))


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    """The error names the field and says what to give."""
    with pytest.raises(ModelNotFound, match="no model folder") as error:
        resolve(path=str(tmp_path / "absent"))
    assert error.value.field == "model.path"
    assert "config.json" in error.value.hint


@pytest.mark.parametrize("path", ["\0", "x" * 5000, "~nobody-of-that-name/model", ""])
def test_paths_no_system_has_are_not_found(path: str) -> None:
    """NUL bytes, endless names, unknown users and the empty name are typed errors."""
    with pytest.raises(ModelError) as error:
        resolve(path=path)
    assert error.value.field == "model.path"


def test_a_config_file_in_the_place_of_a_folder_is_refused_with_the_way_out(folder: Path) -> None:
    """The hint says both what to give instead."""
    with pytest.raises(InvalidParams, match="not a folder") as error:
        resolve(path=str(folder / "config.json"))
    assert "`config`" in error.value.hint


def test_a_folder_without_a_config_is_invalid(tmp_path: Path) -> None:
    """Named by path."""
    with pytest.raises(ModelConfigInvalid, match=r"no config\.json"):
        resolve(path=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{not json", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "holds a JSON list"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "nested more than 64"),
        (b'{"x": NaN}', "holds NaN"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "no config is longer"),
        (b"[]," * MAX_VALUES, "holds more than"),  # before it is parsed, which would tell that it is not JSON
    ],
)
def test_damaged_configs_are_invalid(folder: Path, content: bytes, says: str) -> None:
    """Every way a file can be wrong is one typed error with the field."""
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigInvalid, match=says) as error:
        resolve(path=str(folder))
    assert error.value.field == "model.path"


@pytest.mark.parametrize("content", [b"canary: 7f\n[default]\n", b'{"canary: 7f', b"\xffcanary: 7f", b'"canary: 7f"'])
def test_a_file_that_is_no_config_is_not_shown(tmp_path: Path, content: bytes) -> None:
    """A link to another file of the user's tells that it is no config, and nothing of what it holds."""
    (tmp_path / "secret").write_bytes(content)
    (tmp_path / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelConfigInvalid) as error:
        resolve(path=str(tmp_path))
    assert "canary" not in error.value.message + error.value.hint


def test_infinity_is_allowed_since_published_configs_hold_it(folder: Path) -> None:
    """Mamba-2 configs say "time_step_limit": [0.0, Infinity]."""
    (folder / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert resolve(path=str(folder)).config["time_step_limit"][1] == float("inf")


def test_a_pipe_in_the_place_of_a_config_does_not_block(folder: Path) -> None:
    """A FIFO would make a plain open wait for ever."""
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelConfigInvalid, match="regular file"):
        resolve(path=str(folder))


def test_an_id_follows_the_main_revision(hub: Path) -> None:
    """refs/main decides, not the newest folder."""
    os.utime(hub / "snapshots" / ("a" * 40) / "config.json", (2e9, 2e9))
    source = resolve(model_id="org/name")
    assert (source.model_id, source.config["hidden_size"]) == ("org/name", 2)


@pytest.mark.parametrize("reference", [None, "../../../etc", "c" * 40, "\xff"])
def test_without_a_usable_revision_the_newest_snapshot_is_taken(hub: Path, reference: str | None) -> None:
    """A missing, foreign or dangling refs/main does not lose the model."""
    main = hub / "refs" / "main"
    main.unlink() if reference is None else main.write_text(reference)
    os.utime(hub / "snapshots" / ("a" * 40) / "config.json", (2e9, 2e9))
    assert resolve(model_id="org/name").config["hidden_size"] == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "long", "loop"])
def test_a_revision_that_is_no_short_text_is_not_waited_for(hub: Path, kind: str) -> None:
    """A FIFO would make a plain read wait for ever, and a link may lead to itself."""
    main = hub / "refs" / "main"
    main.unlink()
    made = {
        "pipe": lambda: os.mkfifo(main),
        "folder": main.mkdir,
        "long": lambda: main.write_text("b" * 10**6),
        "loop": lambda: main.symlink_to(main),
    }
    made[kind]()
    os.utime(hub / "snapshots" / ("a" * 40) / "config.json", (2e9, 2e9))
    assert resolve(model_id="org/name").config["hidden_size"] == 1


def test_links_that_lead_to_themselves_are_no_model(hub: Path) -> None:
    """Snapshot folders and configs alike."""
    for revision in ("a" * 40, "b" * 40):
        config = hub / "snapshots" / revision / "config.json"
        config.unlink()
        config.symlink_to("config.json")
    (hub / "snapshots" / "c").symlink_to("c")
    with pytest.raises(ModelNotFound):
        resolve(model_id="org/name")
    with pytest.raises(ModelNotFound, match="symbolic links"):
        resolve(path=str(hub / "snapshots" / "c"))


@pytest.mark.parametrize("cache", ["~nobody-of-that-name/hub", "/" + "x" * 5000, "/dev/null"])
def test_a_cache_folder_no_system_has_holds_no_model(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Unknown users, endless names and files are typed errors."""
    monkeypatch.setenv("HF_HUB_CACHE", cache)
    with pytest.raises(ModelNotFound):
        resolve(model_id="org/name")


def test_a_folder_whose_name_is_no_text_still_has_a_name(folder: Path) -> None:
    """File names are bytes; a model's name goes over the wire as UTF-8."""
    try:
        odd = folder.rename(folder.with_name(os.fsdecode(b"m\xff")))
    except OSError:  # macOS keeps names as text
        return
    source = resolve(path=str(odd))
    assert source.model_id.encode().decode() == "m?"


def test_an_id_that_was_not_downloaded_is_not_found(hub: Path) -> None:
    """And the error says that nothing is downloaded."""
    with pytest.raises(ModelNotFound, match="org/other") as error:
        resolve(model_id="org/other")
    assert error.value.field == "model.id"
    assert "network" in error.value.hint


@pytest.mark.parametrize(
    "model_id", ["../../etc/passwd", "a/b/c", "", "/abs", "org/..", "org//name", "a--b/c", "org/na me", "-x/y", "x/\0"]
)
def test_ids_that_could_leave_the_cache_are_refused(hub: Path, model_id: str) -> None:
    """Only organisation/name, as the hub itself allows."""
    with pytest.raises(InvalidParams) as error:
        resolve(model_id=model_id)
    assert error.value.field == "model.id"


@pytest.mark.parametrize(
    ("variable", "inside"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_the_cache_is_where_the_hub_client_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, inside: str
) -> None:
    """Each variable of huggingface_hub is honoured."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    snapshot = tmp_path / inside / "models--org--name" / "snapshots" / "r1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv(variable, str(tmp_path))
    assert resolve(model_id="org/name").config == CONFIG


def test_an_inline_config_needs_no_name() -> None:
    """Without a label it is named by its hash."""
    assert resolve(config=CONFIG).model_id == f"config:{config_hash(CONFIG)[:12]}"
    assert resolve(config=CONFIG, config_model_id="mine").model_id == "mine"


@pytest.mark.parametrize("label", ["", "x" * 300, "a\nb"])
def test_labels_that_would_break_a_line_are_refused(label: str) -> None:
    """Labels show up in tables and logs."""
    with pytest.raises(InvalidParams) as error:
        resolve(config=CONFIG, config_model_id=label)
    assert error.value.field == "model.model_id"


@pytest.mark.parametrize("config", [{"x": float("nan")}, {"x": object()}, {1: 2}, {"x": b"bytes"}])
def test_inline_configs_hold_what_json_can(config: dict[Any, Any]) -> None:
    """A Python caller can pass more than JSON; it is refused before anything uses it."""
    with pytest.raises(ModelConfigInvalid) as error:
        resolve(config=config)
    assert error.value.field == "model.config"


def test_a_list_inside_itself_many_times_over_is_refused_soon() -> None:
    """Thirty levels of doubling are 2**30 values; no config has so many."""
    value: list[Any] = []
    for _ in range(30):
        value = [value, value]
    with pytest.raises(ModelConfigInvalid, match="holds more than"):
        resolve(config={"x": value})


def test_exactly_one_way_to_name_a_model() -> None:
    """None and two are wrong."""
    for given_ in ({}, {"path": "/x", "model_id": "a/b"}, {"model_id": "a/b", "config": {}}):
        with pytest.raises(InvalidParams) as error:
            resolve(**given_)  # type: ignore[arg-type]
        assert error.value.field == "model"


@pytest.mark.parametrize("size", [-1, 2**60, True, 1.5, "4GB"])
def test_absurd_weights_are_refused(size: Any) -> None:
    """Weights are a whole number of bytes that a machine could hold."""
    with pytest.raises(InvalidParams) as error:
        resolve(config=CONFIG, weights_bytes=size)
    assert error.value.field == "model.weights_bytes"


def test_given_weights_win_and_say_so() -> None:
    """The caller knows best, and the source of the figure says who said it."""
    weights = resolve(config=CONFIG, weights_bytes=123).weights
    assert weights is not None
    assert (weights.weights_bytes, weights.source) == (123, "given")


@pytest.mark.parametrize(
    ("config", "dtype", "assumed"),
    [
        ({"torch_dtype": "float16"}, "float16", 0),
        ({"dtype": "torch.bfloat16"}, "bfloat16", 0),
        ({"text_config": {"torch_dtype": "float32"}, "torch_dtype": "bfloat16"}, "float32", 0),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16", 1),
        ({}, "bfloat16", 1),
    ],
)
def test_the_number_format_comes_from_the_config_or_is_said_to_be_assumed(
    config: dict[str, Any], dtype: str, assumed: int
) -> None:
    """The language model's own section first."""
    found, notes = compute_dtype(resolve(config=config))
    assert (found, len(notes)) == (dtype, assumed)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists))
def test_any_value_in_a_config_is_accepted_or_refused_with_a_type(value: Any) -> None:
    """No config makes anything but a ModelConfigInvalid."""
    try:
        assert resolve(config={"field": value}).config == {"field": value}
    except ModelConfigInvalid as error:
        assert error.field == "model.config"  # noqa: PT017 -- both outcomes are right


def test_the_network_is_never_used(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving opens no socket, whether the model is there or not."""
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    resolve(model_id="org/name")
    with pytest.raises(ModelNotFound):
        resolve(model_id="org/absent")

"""The config as a value and as a file: nothing is lost, and nothing unknown is guessed at."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.methods import Variant
from veloxquant.serve.builder import KVCacheConfig

if TYPE_CHECKING:
    from pathlib import Path

PLAN = {
    "schema": "veloxquant.cache_config/1",
    "method": "affine",
    "label": "affine4-g64",
    "params": {"bits": 4, "group": 64},
    "packed_layers": [2, 5],
    "layer_count": 6,
    "prefill_step_size": 512,
    "packed_shapes": [[1, 64, 64]],
}

params = st.dictionaries(
    st.text(min_size=1),
    st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    max_size=6,
)
layers = st.none() | st.lists(st.integers(0, 99), unique=True, max_size=9)
configs = st.builds(
    KVCacheConfig,
    method=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True),
    params=params,
    head_dim=st.none() | st.integers(1, 2**16),
    layers=layers,
    layer_count=st.none() | st.integers(100, 1000),
)


@given(configs)
def test_toml_gives_back_an_equal_config(config: KVCacheConfig) -> None:
    """Every value with its type: a float that is whole stays a float, true stays true."""
    back = KVCacheConfig.from_toml(config.to_toml())
    assert back == config
    assert hash(back) == hash(config)
    assert {name: (type(value), repr(value)) for name, value in back.params.items()} == {
        name: (type(value), repr(value)) for name, value in config.params.items()
    }
    assert back.to_toml() == config.to_toml()


@given(configs)
def test_it_is_a_value(config: KVCacheConfig) -> None:
    """Copied, pickled and used as a key."""
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301 -- ours
        assert twin == config
        assert {config: 1}[twin] == 1


def test_the_file_is_the_one_in_the_manual(short_folder: Path) -> None:
    """Read from text and from a file alike, with a byte order mark too."""
    text = 'method = "affine"\nhead_dim = 64 # of one head\nlayers = [5, 2]\n[params]\nbits = 4\ngroup = 32\n'
    expected = KVCacheConfig(method="affine", params={"group": 32, "bits": 4}, head_dim=64, layers=(2, 5))
    path = short_folder / "cache.toml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert KVCacheConfig.from_toml(text) == KVCacheConfig.from_toml(path) == expected
    path.write_text(expected.to_toml())
    assert KVCacheConfig.from_toml(path) == expected
    assert KVCacheConfig.from_toml('method = "fp16"') == KVCacheConfig(method="fp16")


def test_nothing_of_it_can_change() -> None:
    """Not its fields, not its parameters, and not through what it was made from."""
    given_params = {"bits": 4}
    config = KVCacheConfig(method="affine", params=given_params)
    given_params["bits"] = 2
    assert config.params == {"bits": 4}
    with pytest.raises(AttributeError):
        config.method = "fp16"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.params["bits"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ('method = "affine"\nbits = 4', "bits", "no key 'bits'"),
        ('method = "affine"\nheaddim = 4', "headdim", "no key 'headdim'"),
        ('method = "affine"\n[param]\nbits = 4', "param", "no key 'param'"),
        ("head_dim = 64", "method", "names no method"),
        ("", "method", "names no method"),
        ("method = 4", "method", "method is 4"),
        ('method = "Affine"', "method", "method is 'Affine'"),
        ('method = "affine"\nhead_dim = 0', "head_dim", "head_dim is 0"),
        ('method = "affine"\nhead_dim = 64.0', "head_dim", "head_dim is 64.0"),
        ('method = "affine"\nparams = 4', "params", "params is 4"),
        ('method = "affine"\nparams = [["bits", 4]]', "params", "params is"),
        ('method = "affine"\n[params]\nbits = nan', "bits", "bits is nan"),
        ('method = "affine"\n[params]\nbits = [4]', "bits", r"bits is \[4\]"),
        ('method = "affine"\n[params]\nbits = 2026-01-01', "bits", "bits is datetime"),
        ('method = "affine"\n[params]\nbits = 99999999999999999', "bits", "bits is 9"),
        ('method = "affine"\n[params]\n"" = 4', "params", "params is ''"),
        ('method = "affine"\nlayers = [1, 1]', "layers", "unlike"),
        ('method = "affine"\nlayers = [-1]', "layers", "layers is -1"),
        ('method = "affine"\nlayers = [true]', "layers", "layers is True"),
        ('method = "affine"\nlayers = "all"', "layers", "layers is 'all'"),
        ('method = "affine"\nlayers = [2]\nlayer_count = 2', "layers", "layers is 2, not a whole number from 0 to 1"),
        ('method = "affine"\nlayer_count = -1', "layer_count", "layer_count is -1"),
        ("cache.toml", "config", "not TOML"),
        ("method = ", "config", "not TOML"),
        pytest.param("layer_count = 1" + "0" * 5000, "config", "not TOML", id="a number too long"),
        pytest.param("layers = " + "[" * 100_000, "config", "not TOML", id="lists too deep"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_by_its_key(text: str, field: str, message: str) -> None:
    """Unknown keys too: a misspelt one must not silently be a default."""
    with pytest.raises(InvalidParams, match=message) as caught:
        KVCacheConfig.from_toml(text)
    assert caught.value.field == field
    assert caught.value.hint


def test_a_file_that_cannot_be_read_is_named(short_folder: Path) -> None:
    """Missing, a folder, no text, far too long, or no file at all."""
    binary, long = short_folder / "binary", short_folder / "long"
    binary.write_bytes(b"\xff\xfe\x00")
    long.write_bytes(b"#" * (2**20 + 1))
    for path in (short_folder / "absent", short_folder, binary, long):
        with pytest.raises(InvalidParams, match=str(path)):
            KVCacheConfig.from_toml(path)
    for source in (None, 4, b"method = 'affine'"):
        with pytest.raises(InvalidParams, match="TOML text or a path"):
            KVCacheConfig.from_toml(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, 10**400, None, [], b"x", "\udfff", object()])
def test_values_that_no_file_can_hold_are_refused(value: Any) -> None:
    """At once, and not when the file is written."""
    with pytest.raises(InvalidParams) as caught:
        KVCacheConfig(method="affine", params={"bits": value})
    assert caught.value.field == "bits"


def test_a_plan_becomes_the_config_of_what_it_chose() -> None:
    """Method, parameters, layers and their one width; several widths are left to the model."""
    config = KVCacheConfig.from_plan(PLAN)
    assert config == KVCacheConfig(
        method="affine", params={"bits": 4, "group": 64}, head_dim=64, layers=(2, 5), layer_count=6
    )
    assert KVCacheConfig.from_plan({**PLAN, "packed_shapes": [[1, 64, 64], [1, 128, 128]]}).head_dim is None
    assert KVCacheConfig.from_plan({**PLAN, "packed_shapes": [[1, 192, 128]]}).head_dim is None
    assert KVCacheConfig.from_plan({**PLAN, "packed_shapes": None}).head_dim is None
    own = {**PLAN, "method": "fp16", "label": "fp16", "params": {}, "packed_layers": [], "packed_shapes": None}
    assert KVCacheConfig.from_plan(own) == KVCacheConfig(method="fp16", layer_count=6)


def test_a_plan_that_chose_nothing_has_no_config() -> None:
    """The plan's own reason comes through."""
    with pytest.raises(MethodRefused, match="its decision is 'no_fit'"):
        KVCacheConfig.from_plan({"schema": "veloxquant.plan/1", "decision": "no_fit", "chosen": None})
    with pytest.raises(InvalidParams, match="schema is None"):
        KVCacheConfig.from_plan({"method": "affine"})


def test_a_variant_has_a_config() -> None:
    """What the registry lists can be built by it."""
    variant = Variant(method="affine", label="affine4-g64", params={"bits": 4, "group": 64})
    assert KVCacheConfig.of(variant) == KVCacheConfig(method="affine", params={"bits": 4, "group": 64})

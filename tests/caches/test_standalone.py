"""The cache of one head: attention over what it holds, bytes to the byte, and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.codecs import AffineCodec, FloatCodec, TurboQuantMSE, TurboQuantProd
from veloxquant.caches.held import held_bytes
from veloxquant.caches.standalone import STEP, StandaloneCache
from veloxquant.errors import InvalidParams

PAIRS = [
    (TurboQuantProd(64, 2, jl_dim=64), TurboQuantProd(64, 2, jl_dim=64)),
    (TurboQuantProd(80, 3), TurboQuantMSE(80, 3)),
    (TurboQuantMSE(80, 2, outlier_bits=4, outlier_channels=6), TurboQuantMSE(48, 4)),
    (AffineCodec(64, 4, 32), AffineCodec(64, 8, 64)),
    (FloatCodec(72), FloatCodec(72, "float32")),
]


def names(pair: tuple[Any, Any]) -> str:
    """Name of a test case."""
    return "-".join(str(codec.describe()["name"]) for codec in pair) + f"-{pair[0].width}"


def vectors(count: int, width: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Standard normal rows."""
    return mx.array(np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)).astype(dtype)


def decoded(codec: Any, rows: mx.array) -> np.ndarray:
    """What the codec gives back for all rows in one call, float64."""
    x = rows[None, None]
    fixed = codec.start(x[:, :, :1])
    return np.array(codec.decode(codec.encode(x, fixed), fixed, mx.float32)).astype(np.float64)[0, 0]


def softmax_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """By numpy, in float64."""
    scores = queries @ keys.T / math.sqrt(keys.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ values


@pytest.mark.parametrize("pair", PAIRS, ids=names)
@pytest.mark.parametrize("tokens", [1, 300])
def test_attention_is_numpys_over_decoded_keys_and_values(pair: tuple[Any, Any], tokens: int) -> None:
    """Appended by one and by many, in any mixture of the two."""
    cache = StandaloneCache(*pair)
    keys, values = vectors(tokens, pair[0].width, 1), vectors(tokens, pair[1].width, 2)
    for at in range(min(tokens, 20)):
        cache.append(keys[at], values[at])
    cache.append_value(values[20:])
    cache.append_key(keys[20:])
    queries = vectors(3, pair[0].width, 3)
    expected = softmax_attention(np.array(queries), decoded(pair[0], keys), decoded(pair[1], values))
    found = cache.attend(queries)
    assert found.shape == (3, pair[1].width)
    assert np.abs(np.array(found) - expected).max() < 1e-5
    assert np.abs(np.array(cache.attend(queries[1])) - expected[1]).max() < 1e-5
    assert len(cache) == tokens


def test_attention_over_more_tokens_than_are_unpacked_at_a_time() -> None:
    """9,000 tokens are three blocks, and one attention."""
    codec = TurboQuantProd(32, 2)
    cache = StandaloneCache(codec, codec)
    keys, values, query = vectors(9000, 32, 1), vectors(9000, 32, 2), vectors(1, 32, 3)
    cache.append(keys, values)
    expected = softmax_attention(np.array(query), decoded(codec, keys), decoded(codec, values))
    assert np.abs(np.array(cache.attend(query)) - expected).max() < 1e-5


@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_memory_is_what_is_held_after_every_append(pair: tuple[Any, Any]) -> None:
    """One token, many tokens, and one at a time over the step by which buffers grow."""
    cache = StandaloneCache(*pair)
    assert cache.memory_bytes() == held_bytes(cache) == 0
    keys, values = vectors(STEP + 1, pair[0].width, 1), vectors(STEP + 1, pair[1].width, 2)
    seen = set()
    for span in (slice(0, 1), slice(1, STEP - 2), *(slice(at, at + 1) for at in range(STEP - 2, STEP + 1))):
        cache.append(keys[span], values[span])
        assert cache.memory_bytes() == held_bytes(cache)
        seen.add(cache.memory_bytes())
    assert len(seen) == 2
    assert max(seen) > 1.9 * min(seen)


def test_bytes_are_the_arithmetic() -> None:
    """Width 64, 2 bits, 64 rows: 8 bytes of codes, 8 of signs, two scales of 2; 256 slots, K and V."""
    cache = StandaloneCache(TurboQuantProd(64, 2, jl_dim=64), TurboQuantProd(64, 2, jl_dim=64))
    cache.append(vectors(1, 64, 0, mx.float16), vectors(1, 64, 1, mx.float16))
    assert cache.memory_bytes() == 2 * 256 * (8 + 8 + 2 + 2)


def test_the_profilers_example_runs() -> None:
    """Vectors of width 64 one after the other, then one query; results in the format of the query."""
    cache = StandaloneCache(TurboQuantProd(64, 2, jl_dim=64), TurboQuantProd(64, 2, jl_dim=64))
    assert bool(cache)
    assert len(cache) == 0
    assert cache.head_dim == cache._d == 64
    for k, v in zip(vectors(10, 64, 0, mx.float16), vectors(10, 64, 1, mx.float16), strict=True):
        cache.append(k, v)
    attended = cache.attend(vectors(1, 64, 2, mx.float16)[0])
    assert len(cache) == 10
    assert (attended.shape, attended.dtype) == ((64,), mx.float16)


def test_numpy_arrays_and_lists_are_taken() -> None:
    """As MLX reads them."""
    cache = StandaloneCache(FloatCodec(2), FloatCodec(2))
    cache.append(np.ones((3, 2), dtype=np.float32), [[1.0, 2.0]] * 3)
    assert cache.attend([0.5, 0.5]).tolist() == [1.0, 2.0]


def test_a_deep_copy_goes_its_own_way() -> None:
    """What is appended to one is not in the other."""
    cache = StandaloneCache(TurboQuantMSE(64, 2), TurboQuantMSE(64, 2))
    cache.append(vectors(4, 64, 0), vectors(4, 64, 1))
    before, query = cache.attend(vectors(1, 64, 2)), vectors(1, 64, 2)
    copied = copy.deepcopy(cache)
    cache.append(vectors(4, 64, 3), vectors(4, 64, 4))
    assert (len(cache), len(copied)) == (8, 4)
    assert mx.array_equal(copied.attend(query), before)


def test_no_tokens_appended_change_nothing() -> None:
    """Neither bytes nor the format of what follows; and no queries have no results."""
    cache = StandaloneCache(FloatCodec(8), FloatCodec(8))
    cache.append(mx.zeros((0, 8)), mx.zeros((0, 8)))
    assert (len(cache), cache.memory_bytes()) == (0, 0)
    cache.append(mx.ones((1, 8), dtype=mx.float16), mx.ones((1, 8), dtype=mx.float16))
    assert cache.attend(mx.zeros((0, 8))).shape == (0, 8)


@pytest.mark.parametrize("bad", [mx.zeros(63), mx.zeros((2, 65)), mx.zeros((1, 1, 64)), mx.array(1.0), [[1.0], [1, 2]]])
@pytest.mark.parametrize("call", ["append_key", "append_value", "attend"])
def test_a_wrong_shape_is_refused_by_name(call: str, bad: Any) -> None:
    """Keys, values and queries alike, and nothing is stored."""
    cache = StandaloneCache(TurboQuantMSE(64, 2), TurboQuantMSE(64, 2))
    cache.append(vectors(1, 64, 0), vectors(1, 64, 1))
    with pytest.raises(InvalidParams) as caught:
        getattr(cache, call)(bad)
    assert caught.value.field == {"append_key": "keys", "append_value": "values", "attend": "q"}[call]
    assert caught.value.hint == "give vectors of width 64"
    assert len(cache) == 1


@pytest.mark.parametrize("bad", [None, "abc", object()])
def test_what_is_no_array_is_refused(bad: Any) -> None:
    """With what was given."""
    with pytest.raises(InvalidParams, match="must be an array of numbers"):
        StandaloneCache(FloatCodec(4), FloatCodec(4)).append_key(bad)


def test_whole_numbers_and_a_change_of_format_are_refused() -> None:
    """A cast to the format of what is there could overflow in silence."""
    cache = StandaloneCache(FloatCodec(4), FloatCodec(4))
    with pytest.raises(InvalidParams, match="must be float16, bfloat16 or float32, not int32"):
        cache.append_key(mx.zeros((1, 4), dtype=mx.int32))
    cache.append_key(mx.zeros((1, 4), dtype=mx.float16))
    with pytest.raises(InvalidParams, match="keys are float16 so far, and these are float32") as caught:
        cache.append_key(mx.zeros((1, 4)))
    assert caught.value.hint == "cast to float16"


def test_a_pair_is_stored_together_or_not_at_all() -> None:
    """A refused value leaves its key out too."""
    cache = StandaloneCache(FloatCodec(4), FloatCodec(4))
    with pytest.raises(InvalidParams, match="2 keys and 3 values"):
        cache.append(mx.zeros((2, 4)), mx.zeros((3, 4)))
    with pytest.raises(InvalidParams):
        cache.append(mx.zeros((2, 4)), mx.zeros((2, 5)))
    assert cache.memory_bytes() == 0


def test_a_pair_is_checked_without_being_stored() -> None:
    """check_pair refuses what append refuses, by the same words, and passes what append_key and append_value take."""
    cache = StandaloneCache(FloatCodec(4), FloatCodec(6))
    cache.append(mx.zeros((1, 4), dtype=mx.float16), mx.zeros((1, 6)))
    good = (mx.zeros((2, 4), dtype=mx.float16), mx.zeros((2, 6)))
    bad = [(mx.zeros((2, 4)), good[1]), (good[0], good[1][:1]), (good[0], mx.zeros((2, 5))), (None, good[1])]
    for pair in bad:
        with pytest.raises(InvalidParams) as stored:
            cache.append(*pair)
        with pytest.raises(InvalidParams) as checked:
            cache.check_pair(*pair)
        assert (str(checked.value), checked.value.field) == (str(stored.value), stored.value.field)
    before = cache.memory_bytes()
    cache.check_pair(*good)
    assert (len(cache), cache.memory_bytes()) == (1, before)
    cache.append_key(good[0])
    cache.append_value(good[1])
    assert len(cache) == 3


def test_attention_waits_for_tokens_and_for_their_values() -> None:
    """An empty cache and a key without a value are errors that say what to do."""
    cache = StandaloneCache(FloatCodec(4), FloatCodec(4))
    with pytest.raises(InvalidParams, match="no tokens to attend to") as caught:
        cache.attend(mx.zeros(4))
    assert caught.value.hint
    cache.append_key(mx.zeros(4))
    with pytest.raises(InvalidParams, match="1 keys and 0 values"):
        cache.attend(mx.zeros(4))
    cache.append_value(mx.ones(4))
    assert cache.attend(mx.zeros(4)).tolist() == [1.0] * 4


def test_a_nan_is_seen_by_every_query() -> None:
    """As in attention over floats; it is not hidden."""
    cache = StandaloneCache(TurboQuantProd(64, 2), TurboQuantProd(64, 2))
    cache.append(vectors(3, 64, 0), vectors(3, 64, 1))
    bad = vectors(1, 64, 2)
    bad[0, 5] = math.nan
    cache.append(bad, vectors(1, 64, 3))
    assert np.isnan(np.array(cache.attend(vectors(2, 64, 4)))).all()

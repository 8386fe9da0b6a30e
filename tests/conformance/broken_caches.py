"""A packed method that keeps every promise, and one for each promise that breaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.attention import Packed
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.packed import PackedKVCache
from veloxquant.methods import LayerSpec, Method, QualityPrior, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods import CachePart

BITS, GROUP = 4, 32


class Healthy(Method):
    """Affine groups of 32 numbers in 4 bits."""

    name = "healthy"
    batchable = True
    kind: ClassVar[type[Any]] = PackedKVCache

    def variants(self) -> Sequence[Variant]:
        """One."""
        return [Variant(method=self.name, label=self.name)]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Groups must divide the widths."""
        if part.key_width % GROUP or part.value_width % GROUP:
            return "width_not_divisible", f"groups of {GROUP} do not divide {part.key_width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Codes, and a scale and a bias for each group."""
        return BITS + 2 * 8 * part.key_itemsize / GROUP

    value_bits = key_bits

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """None that counts."""
        return QualityPrior(kl_mean=0.1, low=0.1, high=0.1, source="none")

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh cache."""
        return self.kind(
            AffineCodec(layer.part.key_width, BITS, GROUP), AffineCodec(layer.part.value_width, BITS, GROUP)
        )


class _WrongBytes(PackedKVCache):
    @property
    def nbytes(self) -> int:
        return max(0, super().nbytes - 4)


class _HeldBeside(PackedKVCache):
    """Keeps the last call's floats."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self.last = keys
        return super().update_and_fetch(keys, values)


class _MaskOffByOne(PackedKVCache):
    def make_mask(self, *args: Any, **options: Any) -> Any:
        self.offset += 1
        try:
            return super().make_mask(*args, **options)
        finally:
            self.offset -= 1


class _Blind(Packed):
    """In a call of several tokens none of them sees the token before it."""

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        count = queries.shape[2]
        if count == 1:
            return super().attend(queries, values, scale, mask)
        last = mx.arange(self.tokens - count, self.tokens)[:, None]
        places = mx.arange(self.tokens)
        return super().attend(queries, values, scale, (places <= last) & (places != last - 1))


class _AttendsOffByOne(PackedKVCache):
    def keys_and_values(self) -> Any:
        _, values = super().keys_and_values()
        return _Blind(self.key_codec, self.keys, self.key_fixed, self.offset), values


class _Scrambled(PackedKVCache):
    """Gives each token another's values, the same ones in any call."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return super().update_and_fetch(keys, 30 * values[..., ::-1])


class _GroupsByCall(PackedKVCache):
    """Levels span what one call brings, so that boundaries of groups are those of calls."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        levels = abs(keys).max(axis=2, keepdims=True) / 3
        return super().update_and_fetch(mx.round(keys / levels) * levels, values)


class _FloatBatch(PackedKVCache):
    """Its batch is a list of floats."""

    @classmethod
    def merge(cls, caches: Any) -> Any:
        return BatchKVCache.merge([_unpacked(cache) for cache in caches])


def _unpacked(cache: PackedKVCache) -> KVCache:
    plain = KVCache()
    if not cache.empty():
        keys, values = cache.keys_and_values()
        plain.update_and_fetch(
            keys.codec.decode(keys.stored, keys.fixed, mx.float32),
            values.codec.decode(values.stored, values.fixed, mx.float32),
        )
    return plain


class _Forgetful(PackedKVCache):
    """Its state has no biases of values."""

    @property
    def state(self) -> Any:
        keys, values, *rest = super().state
        return (keys, values[:2], *rest)

    @state.setter
    def state(self, state: Any) -> None:
        PackedKVCache.state.fset(self, state)  # type: ignore[attr-defined]


class _Unregistered(PackedKVCache):
    """mlx-lm does not know the name."""


class _Inseparable(PackedKVCache):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _TrimsNothing(PackedKVCache):
    def trim(self, n: int) -> int:
        return min(n, self.offset)


class _TrimsLess(PackedKVCache):
    def trim(self, n: int) -> int:
        return super().trim(min(n, 2))


class _CountsHeld(PackedKVCache):
    """Tells the engine how many tokens it has room for, as one that drops tokens might."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self.offset = self.told if hasattr(self, "told") else self.offset
        found = super().update_and_fetch(keys, values)
        self.told, self.offset = self.offset, min(self.offset, 100)
        return found


class _TrimsWhenEmpty(PackedKVCache):
    """Says that it can rewind, until it holds something."""

    def is_trimmable(self) -> bool:
        return not self.offset

    def trim(self, n: int) -> int:
        return 0


class _Sized(PackedKVCache):
    def __len__(self) -> int:
        return self.offset


class _NoGroups(PackedKVCache):
    """`bits` without `group_size`."""

    def __getattribute__(self, name: str) -> Any:
        if name == "group_size":
            raise AttributeError(name)
        return object.__getattribute__(self, name)


class _NotFinite(PackedKVCache):
    """Divides keys by their length, zero or not."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        length = mx.sqrt((keys * keys).sum(axis=-1, keepdims=True))
        return super().update_and_fetch(keys / length * length, values)


class _RowsMixed(PackedKVCache):
    """Its batch gives every row the first row's keys."""

    @classmethod
    def merge(cls, caches: Any) -> Any:
        return _mixing(PackedKVCache.merge(caches))


def _mixing(twin: Any) -> Any:
    update = type(twin).update_and_fetch

    class Mixing(type(twin)):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            return update(self, mx.broadcast_to(keys[:1], keys.shape), values)

    twin.__class__ = Mixing
    return twin


class _Shared(Healthy):
    """One cache for all requests of a layer."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        return self._kept.setdefault(layer.index, super().build(layer, variant))


class _Imitation(Healthy):
    """Says 4 bits and holds the floats."""

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        return PackedKVCache(FloatCodec(layer.part.key_width), FloatCodec(layer.part.value_width))


class _Careless(Healthy):
    """Refuses a width and builds for it all the same."""

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        if layer.part.key_width % GROUP:
            return KVCache()
        return super().build(layer, variant)


class _Rude(Healthy):
    """Refuses a width with an error that is none of ours."""

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        if layer.part.key_width % GROUP:
            raise ValueError("groups do not divide the width")
        return super().build(layer, variant)


class _Modest(Healthy):
    """Says that its caches cannot be batched, and they merge."""

    batchable = False


class _Handless(Healthy):
    """Its caches give the engine what it cannot attend to."""

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        class Handless(PackedKVCache):
            def update_and_fetch(self, keys: Any, values: Any) -> Any:
                super().update_and_fetch(keys, values)
                return None, None

        return Handless(
            AffineCodec(layer.part.key_width, BITS, GROUP), AffineCodec(layer.part.value_width, BITS, GROUP)
        )


def _of(cache: type[Any]) -> Method:
    method = Healthy()
    method.kind = cache  # type: ignore[misc]
    return method


BROKEN: dict[str, tuple[Method, str]] = {
    "nbytes that leaves something out": (_of(_WrongBytes), "bytes"),
    "floats held beside what is packed": (_of(_HeldBeside), "bytes"),
    "4 bits declared and floats held": (_Imitation(), "bytes"),
    "floats that change nothing": (_Imitation(), "moves"),
    "values that are others'": (_of(_Scrambled), "moves"),
    "a mask off by one": (_of(_MaskOffByOne), "masks"),
    "a token hidden in calls of several": (_of(_AttendsOffByOne), "steps"),
    "group boundaries by call, in chunks": (_of(_GroupsByCall), "chunks"),
    "group boundaries by call, in steps": (_of(_GroupsByCall), "steps"),
    "a merge into a cache of floats": (_of(_FloatBatch), "batch_bytes"),
    "rows of a batch mixed up": (_of(_RowsMixed), "batch"),
    "a state that forgets an array": (_of(_Forgetful), "state"),
    "a class that mlx-lm cannot find": (_of(_Unregistered), "saved"),
    "a deep copy that is the cache itself": (_of(_Inseparable), "deep_copy"),
    "a trim that forgets nothing": (_of(_TrimsNothing), "trim"),
    "a trim of fewer tokens than asked": (_of(_TrimsLess), "trim"),
    "a rewind that is not done": (_of(_TrimsNothing), "speculative"),
    "an offset of tokens held": (_of(_CountsHeld), "offset"),
    "a rewind promised when empty": (_of(_TrimsWhenEmpty), "flags"),
    "a rewind promised when empty, and asked for": (_of(_TrimsWhenEmpty), "speculative"),
    "a length that is zero at first": (_of(_Sized), "surface"),
    "bits without group_size": (_of(_NoGroups), "surface"),
    "NaN from rows of zeros": (_of(_NotFinite), "finite"),
    "one cache for all requests": (_Shared(), "fresh_list"),
    "a refused width that is built": (_Careless(), "refusal"),
    "a refusal without a type": (_Rude(), "refusal"),
    "a merge that was not promised": (_Modest(), "flags"),
    "what the engine cannot attend to": (_Handless(), "layers"),
}
"""What is wrong -> (a method, the check that is meant for it)."""

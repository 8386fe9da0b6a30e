"""What a call may bring to a cache: checked before anything is stored, in the same words by every kind of cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from veloxquant.caches.codec import Codec


def check_widths(keys: Any, values: Any, key_codec: Codec, value_codec: Codec) -> None:
    """Raises MethodRefused for a call without tokens and for arrays of other widths than the codecs'."""
    if not keys.shape[2]:
        raise MethodRefused("a call without tokens", hint="call the model with at least one token")
    for what, array, codec in (("keys", keys, key_codec), ("values", values, value_codec)):
        if array.shape[-1] != codec.width:
            raise MethodRefused(
                f"{what} of width {array.shape[-1]} for a cache of width {codec.width}", hint="plan for this model"
            )


def check_held(keys: Any, held: Any) -> None:
    """Raises MethodRefused for another batch or count of heads than that of an array that is held."""
    if tuple(held.shape[:2]) != tuple(keys.shape[:2]):
        raise MethodRefused(
            f"(batch, KV heads) = {tuple(keys.shape[:2])} for a cache that holds {tuple(held.shape[:2])}",
            hint="use a fresh cache for each request",
        )


def check_rows(keys: Any, rows: int, heads: int | None) -> None:
    """Raises MethodRefused for other rows than a batch has, or other heads where it holds some (not None)."""
    given, held = tuple(keys.shape[:2]), (rows, heads or keys.shape[1])
    if given != held:
        raise MethodRefused(
            f"(rows, KV heads) = {given} for a batch of {held}", hint="filter or extend the batch first"
        )

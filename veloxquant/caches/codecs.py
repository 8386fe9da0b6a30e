"""The codecs by name: what a description written by `Codec.describe` is made from again, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from veloxquant.caches import by_head
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.channel_classes import ChannelClassesCodec
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.refit import RefitAffineCodec, RefitPerChannelCodec
from veloxquant.caches.rotated import described
from veloxquant.caches.symmetric import SymmetricCodec
from veloxquant.caches.turboquant import TurboQuantMSE, TurboQuantProd
from veloxquant.errors import InvalidParams, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.caches.codec import Codec

_CODECS: Mapping[str, Callable[..., Any]] = {
    "float": FloatCodec,
    "affine": AffineCodec,
    "per_channel": PerChannelCodec,
    "affine_refit": RefitAffineCodec,
    "per_channel_refit": RefitPerChannelCodec,
    "symmetric": SymmetricCodec,
    "rotated": described,
    "by_head": by_head.described,
    "channel_classes": ChannelClassesCodec,
    "turboquant_mse": TurboQuantMSE,
    "turboquant_prod": TurboQuantProd,
}

_HINT = "give a description as describe() writes it"


def make(description: Mapping[str, int | float | str]) -> Codec:
    """The codec that `describe()` described. Raises InvalidParams for an unknown name or parameter."""
    if not isinstance(description, Mapping):
        raise InvalidParams(f"this is no description of a codec: {quoted(description)}", hint=_HINT)
    parameters = dict(description)
    name = parameters.pop("name", None)
    made = _CODECS.get(name) if isinstance(name, str) else None
    if made is None:
        raise InvalidParams(f"no such codec: {quoted(name)}", hint=f"use {', '.join(_CODECS)}", field="name")
    try:
        codec: Codec = made(**parameters)
    except TypeError as error:
        raise InvalidParams(f"{name} cannot be made from {quoted(description)}: {error}", hint=_HINT) from error
    return codec

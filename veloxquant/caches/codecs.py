"""The codecs by name: what a description written by `Codec.describe` is made from again, in any process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.turboquant import TurboQuantMSE, TurboQuantProd
from veloxquant.errors import InvalidParams, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.caches.codec import Codec

_CODECS: Mapping[str, Callable[..., Any]] = {
    "float": FloatCodec,
    "affine": AffineCodec,
    "turboquant_mse": TurboQuantMSE,
    "turboquant_prod": TurboQuantProd,
}


def make(description: Mapping[str, int | float | str]) -> Codec:
    """The codec that `describe()` described. Raises InvalidParams for an unknown name or parameter."""
    parameters = dict(description)
    name = parameters.pop("name", None)
    made = _CODECS.get(name) if isinstance(name, str) else None
    if made is None:
        raise InvalidParams(f"no such codec: {quoted(name)}", hint=f"use {', '.join(_CODECS)}", field="name")
    try:
        codec: Codec = made(**parameters)
    except TypeError as error:
        hint = "give a description as describe() writes it"
        raise InvalidParams(f"{name} cannot be made from {quoted(description)}: {error}", hint=hint) from error
    return codec

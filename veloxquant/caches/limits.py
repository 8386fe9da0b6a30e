"""What a codec's parameters may be, checked where a codec is made."""

from __future__ import annotations

from veloxquant.errors import InvalidParams, quoted

WIDEST = 2**16
"""Widest vector of a codec that has no bound of its own: far more than any head or latent."""


def whole(value: object, field: str, low: int, high: int) -> int:
    """A whole number within bounds. Raises InvalidParams that names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{field} must be a whole number from {low} to {high}, not {quoted(value)}"
        raise InvalidParams(message, hint=f"give {field} between {low} and {high}", field=field)
    return value


def one_of(value: object, field: str, choices: tuple[int, ...]) -> None:
    """One of a few numbers. Raises InvalidParams that names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise InvalidParams(f"{field} must be one of {listed}, not {quoted(value)}", hint=f"use {listed}", field=field)


def flag(value: object, field: str) -> None:
    """True or false. Raises InvalidParams that names the field."""
    if not isinstance(value, bool):
        message = f"{field} must be true or false, not {quoted(value)}"
        raise InvalidParams(message, hint="give true or false", field=field)

"""Lines that are no request, of every kind that parsers have died of; none of them is ever a good one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GOOD = b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"path":"/models/x"},"workload":{"batch_size":2}}}'


def _noise(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randint(0, 60)).replace(b"\n", b"\0")


def _cut(dice: random.Random) -> bytes:
    return _GOOD[: dice.randrange(1, len(_GOOD))]


def _deep(dice: random.Random) -> bytes:
    depth = dice.choice((30, 600, 5000))
    return dice.choice((b"[" * depth, b'{"a":' * depth, _params(b"[" * depth + b"]" * depth)))


def _no_number(dice: random.Random) -> bytes:
    return _params(dice.choice((b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"+1", b"0x1", b"1.", b"--1")))


def _huge(dice: random.Random) -> bytes:
    return _GOOD.replace(b'"id":1', b'"id":' + b"9" * dice.choice((17, 40, 5000)))


def _bad_utf8(dice: random.Random) -> bytes:
    at = dice.randrange(len(_GOOD))
    return _GOOD[:at] + dice.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80")) + _GOOD[at:]


def _nul(dice: random.Random) -> bytes:
    at = dice.randrange(len(_GOOD))
    return _GOOD[:at] + b"\0" * dice.randint(1, 4) + _GOOD[at:]


def _crlf(dice: random.Random) -> bytes:
    return dice.choice((b"\r", b"\r\r\r", _GOOD[:50] + b"\r", b'{"jsonrpc":"2.0",\r"id":1}\r'))


def _surrogate(dice: random.Random) -> bytes:
    half = dice.choice((b"\\ud800", b"\\udfff", b"\\ud800\\ud800"))
    return _GOOD.replace(b'"id":1', b'"id":"' + half + b'"')


def _twice(dice: random.Random) -> bytes:
    """The last of two names counts, and it is the wrong one."""
    last = dice.choice((b',"method":"nothing"}', b',"id":null}', b',"jsonrpc":"1.0"}', b',"params":[]}'))
    return _GOOD[:-1] + last


def _params(value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"config":{"a":' + value + b'}},"x":1}}'


KINDS = {
    "random bytes": _noise,
    "truncated JSON": _cut,
    "deep nesting": _deep,
    "NaN and its kin": _no_number,
    "huge integers": _huge,
    "bad UTF-8": _bad_utf8,
    "NUL": _nul,
    "CRLF": _crlf,
    "lone surrogates": _surrogate,
    "duplicate keys": _twice,
}


def dice(seed: int) -> random.Random:
    """A repeatable walk."""
    return random.Random(seed)  # noqa: S311 -- not for secrets


def lines(count: int, seed: int) -> Iterator[bytes]:
    """So many lines with their newlines, every kind in turn."""
    walk = dice(seed)
    makers: list[Callable[[random.Random], bytes]] = list(KINDS.values())
    for number in range(count):
        yield makers[number % len(makers)](walk) + b"\n"

"""R17: the same requests byte by byte, in pieces and all in one write give the same answers, in their order."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import session
from reliability import figures, load, malformed, questions, wire

from veloxquant.wire.messages import encode_request

REQUESTS = 1000


def requests() -> list[bytes]:
    """Plans, pings, lists and mistakes; each good one with a number of its own."""
    asks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ping", {}),
        ("methods", {"name": "affine"}),
        ("records", {}),
        ("plan", questions.params(4096)),
    )
    broken = malformed.lines(REQUESTS, seed=17)
    lines = []
    for number in range(REQUESTS):
        method, params = asks[number % len(asks)]
        lines.append(next(broken) if number % 5 == 0 else encode_request(number, method, params))
    return lines


def answers(path: str, stream: bytes, sizes: list[int]) -> list[bytes]:
    """What the daemon says to this stream, cut into pieces of these sizes in turn."""
    connection = wire.Wire(path)

    def send() -> None:
        at, turn = 0, 0
        while at < len(stream):
            connection.send(stream[at : at + sizes[turn % len(sizes)]])
            at, turn = at + sizes[turn % len(sizes)], turn + 1

    sender = threading.Thread(target=send)
    sender.start()  # beside the reading, or both sides would wait for each other
    found = connection.lines(stream.count(b"\n"))
    sender.join()
    connection.close()
    return found


def one_by_one(path: str, lines: list[bytes]) -> list[bytes]:
    """Each answer awaited before the next request."""
    connection, found = wire.Wire(path), []
    for line in lines:
        connection.send(line)
        found += connection.lines(1)
    connection.close()
    return found


def differing(found: list[bytes], expected: list[bytes]) -> int:
    """How many answers are other than expected, or missing."""
    return abs(len(found) - len(expected)) + sum(a != b for a, b in zip(found, expected, strict=False))


def deliveries(path: str, lines: list[bytes], few: int) -> list[list[bytes]]:
    """The answers one by one, in one write, in odd pieces, and of the first few byte by byte."""
    whole = b"".join(lines)
    dice = random.Random(17)  # noqa: S311 -- a repeatable walk
    sizes = [dice.randint(1, 999) for _ in range(97)]
    return [
        one_by_one(path, lines),
        answers(path, whole, [len(whole)]),
        answers(path, whole, sizes),
        answers(path, b"".join(lines[:few]), [1]),
    ]


def in_one_world(path: str, lines: list[bytes], few: int) -> list[list[bytes]]:
    """The same, again where the machine's memory moved meanwhile: another generation answers otherwise, rightly."""
    for _ in range(10):
        before = wire.Wire(path).ask(questions.PING)
        found = deliveries(path, lines, few)
        if wire.Wire(path).ask(questions.PING) == before:
            return found
    raise session.SessionError("the generation moved ten times over")


def main() -> int:
    """1,000 requests; byte by byte the first 100 of them, or all."""
    few = REQUESTS if figures.options(__doc__ or "").full else 100
    with session.private_home() as home, session.running(home):
        path = str(home.socket)
        load.run(path, questions.plans(1), 1)
        singly, at_once, odd, bytewise = in_one_world(path, requests(), few)
    for label, found, expected in (
        (f"{REQUESTS:,} requests in one write", at_once, singly),
        (f"{REQUESTS:,} requests in odd pieces", odd, singly),
        (f"{few:,} requests byte by byte", bytewise, singly[:few]),
    ):
        wrong = differing(found, expected)
        figures.at_most("R17", f"{label}: answers other than one by one", wrong, "answers", 0)
    good = [answer for line in at_once if "result" in (answer := msgspec.json.decode(line))]
    numbers = [answer["id"] for answer in good]
    out_of_order = sum(after <= before for before, after in itertools.pairwise(numbers))
    figures.at_most("R17", f"{REQUESTS:,} requests in one write: out of order", out_of_order, "answers", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

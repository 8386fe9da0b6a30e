"""R14: a line of 1 GiB without an end costs 512 KiB at most and ends in frame_too_large and a close."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, wire

GIB = 2**30
PIECE = b"x" * 65536
ROUNDS = 20


def send_long_line(path: str) -> tuple[int, list[bytes], bool]:
    """Bytes that went out before the daemon hung up, what it said, and whether it closed."""
    connection, sent = wire.Wire(path), 0
    try:
        while sent < GIB:
            connection.send(PIECE)
            sent += len(PIECE)
    except (BrokenPipeError, ConnectionResetError):
        pass
    said = connection.lines(1)
    closed = connection.is_closed(5.0)
    connection.close()
    return sent, said, closed


def main() -> int:
    """The same in short and in full: it takes a moment."""
    figures.options(__doc__ or "")
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        wire.fresh_pings_ms(path, 50)
        before = wire.vitals(daemon)
        ends, most_sent = 0, 0
        with wire.highest_resident(daemon) as resident:
            for _ in range(ROUNDS):
                sent, said, closed = send_long_line(path)
                most_sent = max(most_sent, sent)
                names = [json.loads(line)["error"]["data"]["name"] for line in said]
                ends += names == ["frame_too_large"] and closed
        after = wire.vitals(daemon)
    label = f"a line of 1 GiB, {ROUNDS} times"
    figures.at_most("R14", f"{label}: ended otherwise than by frame_too_large and a close", ROUNDS - ends, "times", 0)
    figures.at_most("R14", f"{label}: most resident memory above the start", resident[1] - resident[0], "KiB", 512)
    figures.say("R14", f"{label}: most that was sent before the close", most_sent / 1024, "KiB", "none", met=True)
    figures.at_most("R14", f"{label}: descriptors more than before", after.files - before.files, "files", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One connection: order, bounds and silences, with a desk that answers as the test likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from veloxquant.daemon.connection import Connection, Patience
from veloxquant.daemon.peer import Peer
from veloxquant.wire.frames import REQUEST_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Desk:
    """Answers each frame with itself; "later" after a moment, "never" not at all, "big" with much."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.caught_up_count = 0
        self.frames: list[bytes] = []

    def answer(self, frame: bytes, client: Connection) -> bytes | Awaitable[bytes]:
        """By the frame's first word."""
        self.frames.append(frame)
        if frame.startswith(b"later"):
            return self._later(frame)
        if frame.startswith(b"never"):
            return asyncio.get_running_loop().create_future()
        if frame.startswith(b"big"):
            return b"x" * 100_000 + b"\n"
        return frame + b"\n"

    async def _later(self, frame: bytes) -> bytes:
        await asyncio.sleep(0.02)
        return frame + b"\n"

    def caught_up(self, client: Connection) -> None:
        """Count."""
        self.caught_up_count += 1

    def gone(self, client: Connection) -> None:
        """Note."""
        self.lost.set()


class Pair:
    """A connection and the client's end of it."""

    def __init__(self, desk: Desk, connection: Connection, there: socket.socket) -> None:
        self.desk = desk
        self.connection = connection
        self.there = there
        self.loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """From the client."""
        await self.loop.sock_sendall(self.there, data)

    async def read(self, size: int = 1 << 20) -> bytes:
        """To the client; empty at the end."""
        return await asyncio.wait_for(self.loop.sock_recv(self.there, size), 10)

    async def read_all(self) -> bytes:
        """Until the end, which is a reset where the daemon left bytes of ours unread."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await self.read():
                data += part
        return data

    async def read_lines(self, count: int) -> list[bytes]:
        """This many lines."""
        data = b""
        while data.count(b"\n") < count:
            part = await self.read()
            assert part, f"closed after {data[-200:]!r}"
            data += part
        return data.splitlines()


def with_pair(scenario: Callable[[Pair], Awaitable[None]], **patience: float) -> None:
    """Run a scenario on a fresh pair."""

    async def run() -> None:
        here, there = socket.socketpair()
        there.settimeout(0)
        desk = Desk()
        connection = Connection(desk, Peer(0, 1), Patience(**patience))
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, here)
        try:
            await scenario(Pair(desk, connection, there))
        finally:
            connection.abort()
            there.close()
            await asyncio.wait_for(desk.lost.wait(), 10)

    asyncio.run(run())


def test_r17_answers_come_in_the_order_of_the_questions() -> None:
    """Even when an earlier one takes longer."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"a\nlater b\nc\nlater d\ne\n")
        assert await pair.read_lines(5) == [b"a", b"later b", b"c", b"later d", b"e"]

    with_pair(scenario)


def test_r17_a_thousand_in_one_write_equal_byte_by_byte() -> None:
    """Delivery does not matter."""
    stream = b"".join(b"frame %d\n" % number for number in range(1000))

    async def scenario(pair: Pair) -> None:
        sending = asyncio.ensure_future(pair.send(stream))
        whole = await pair.read_lines(1000)
        await sending
        for byte in stream[:400]:
            await pair.send(bytes([byte]))
        singly = await pair.read_lines(stream[:400].count(b"\n"))
        assert singly == whole[: len(singly)]
        assert whole == stream.splitlines()

    with_pair(scenario)


def test_r14_a_long_line_is_answered_once_and_closed() -> None:
    """What came before it is answered, what comes after is not."""

    async def scenario(pair: Pair) -> None:
        sending = asyncio.ensure_future(pair.send(b"before\n" + b"x" * (REQUEST_LIMIT_BYTES + 1) + b"\nafter\n"))
        before, error = (await pair.read_all()).splitlines()
        assert before == b"before"
        assert json.loads(error)["error"]["data"]["name"] == "frame_too_large"
        assert json.loads(error)["id"] is None
        await asyncio.gather(sending, return_exceptions=True)

    with_pair(scenario)


def test_a_client_that_stops_sending_still_gets_its_answers() -> None:
    """As `printf ... | nc -U` does."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"later a\nb\n")
        pair.there.shutdown(socket.SHUT_WR)
        assert await pair.read_all() == b"later a\nb\n"

    with_pair(scenario)


def test_r15_patience_is_what_the_protocol_promises() -> None:
    """30 s for half a line, 5 s for who does not read, ten minutes of silence."""
    patience = Patience()
    assert (patience.half_frame_s, patience.stalled_s, patience.idle_s) == (30, 5, 600)


def test_r15_half_a_frame_is_waited_for_only_so_long() -> None:
    """Counted from its first byte: dribbling does not help."""

    async def scenario(pair: Pair) -> None:
        for _ in range(3):
            with contextlib.suppress(BrokenPipeError):  # a busy machine may have waited long enough before
                await pair.send(b"x")
            await asyncio.sleep(0.02)
        assert await pair.read_all() == b""

    with_pair(scenario, half_frame_s=0.05)


def test_whole_frames_reset_the_wait_for_half_ones() -> None:
    """A client that sends in odd pieces is not cut off while frames complete."""

    async def scenario(pair: Pair) -> None:
        for _ in range(6):
            await pair.send(b"ab\ncd")
            await asyncio.sleep(0.05)
        await pair.send(b"\n")
        assert len(await pair.read_lines(7)) == 7

    with_pair(scenario, half_frame_s=0.2)


def test_r15_an_idle_client_is_closed() -> None:
    """It can connect again."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"a\n")
        assert await pair.read_all() == b"a\n"

    with_pair(scenario, idle_s=0.1)


def test_r15_a_subscriber_is_never_idle() -> None:
    """It listens."""

    async def scenario(pair: Pair) -> None:
        pair.connection.subscribed = True
        await asyncio.sleep(0.2)
        await pair.send(b"a\n")
        assert await pair.read_lines(1) == [b"a"]

    with_pair(scenario, idle_s=0.05)


def test_a_client_whose_answer_takes_long_is_not_idle() -> None:
    """It waits for us."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"never\n")
        await asyncio.sleep(0.2)
        assert not pair.desk.lost.is_set()

    with_pair(scenario, idle_s=0.05)


def test_r16_a_client_that_never_reads_is_bounded_and_closed() -> None:
    """Its frames are not even answered once the buffers are full."""

    async def scenario(pair: Pair) -> None:
        asking = asyncio.ensure_future(pair.send(b"big\n" * 2000))
        await asyncio.wait_for(pair.desk.lost.wait(), 10)
        # 100 kB an answer: what the kernel took, one high-water mark and one answer.
        assert len(pair.desk.frames) < 100
        await asyncio.gather(asking, return_exceptions=True)

    with_pair(scenario, stalled_s=0.2)


def test_r16_short_lines_of_a_client_that_never_reads_are_bounded() -> None:
    """As objects they would take 20 times their bytes: they are cut a few at a time."""

    async def scenario(pair: Pair) -> None:
        asking = asyncio.ensure_future(pair.send(b"never\n" + b"xx\n" * 400_000))
        await asyncio.sleep(0.1)
        connection = pair.connection
        assert len(connection._arrived) <= 2 * 64 * 1024  # what is read at once, twice
        assert len(connection._frames) <= 4096
        asking.cancel()

    with_pair(scenario)


def test_a_line_that_ends_while_an_answer_is_made_is_no_half_line() -> None:
    """Its end has arrived, though it is looked at only when its turn comes."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"a\nnever\nsecond")
        assert await pair.read_lines(1) == [b"a"]
        pair.connection._after("half", 30, pair.connection.abort)  # as if begun before the answer that takes long
        await pair.send(b" half\n")
        for _ in range(1000):
            await asyncio.sleep(0)
        assert pair.connection._arrived.endswith(b" half\n")
        assert "half" not in pair.connection._timers

    with_pair(scenario)


def test_a_client_that_catches_up_is_served_on() -> None:
    """And the desk hears of it, for notices that waited."""

    async def scenario(pair: Pair) -> None:
        asking = asyncio.ensure_future(pair.send(b"big\n" * 50))
        await asyncio.sleep(0.1)
        lines = await pair.read_lines(50)
        await asking
        assert [len(line) for line in lines] == [100_000] * 50
        assert pair.connection.writable
        assert pair.desk.caught_up_count > 0

    with_pair(scenario)


def test_reading_stops_while_frames_wait() -> None:
    """A client cannot make us hold more than a buffer's worth of questions."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"never\n")
        flood = asyncio.ensure_future(pair.send(b"q" * 1000 + b"\n" + b"q" * 20_000_000))
        done, _ = await asyncio.wait([flood], timeout=0.3)
        assert not done
        assert pair.desk.frames == [b"never"]
        flood.cancel()

    with_pair(scenario)


def test_finishing_answers_what_has_arrived() -> None:
    """Then closes; what comes later is not read."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"later a\nb\n")
        await asyncio.sleep(0.01)
        pair.connection.finish()
        await pair.send(b"c\n")
        assert await pair.read_all() == b"later a\nb\n"

    with_pair(scenario)


def test_an_http_client_is_told_what_this_is() -> None:
    """It shows in curl --unix-socket."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = (await pair.read_all()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert f"Content-Length: {len(body)}".encode() in head
        assert b"JSON-RPC 2.0" in body
        assert body.count(b"\n") == 1

    with_pair(scenario)


def test_a_client_that_goes_takes_its_work_along() -> None:
    """Its answer has nowhere to go."""

    async def scenario(pair: Pair) -> None:
        await pair.send(b"never\n")
        await asyncio.sleep(0.02)
        task: Any = pair.connection._working
        pair.connection.abort()
        await asyncio.wait_for(pair.desk.lost.wait(), 10)
        await asyncio.sleep(0)
        assert task.cancelled()

    with_pair(scenario)

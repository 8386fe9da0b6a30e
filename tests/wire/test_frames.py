"""Lines are cut the same way however the bytes arrive, and the limit holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from veloxquant.wire.frames import ANSWER_LIMIT_BYTES, REQUEST_LIMIT_BYTES, FrameSplitter

LINES = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=12)


def in_pieces(stream: bytes, sizes: list[int]) -> list[bytes]:
    """Cut a stream at the given sizes; the rest is one piece."""
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [*pieces, stream]


def test_r14_the_limits_are_the_protocols() -> None:
    """A request may have 256 KiB and an answer 1 MiB."""
    assert (REQUEST_LIMIT_BYTES, ANSWER_LIMIT_BYTES) == (262_144, 1_048_576)


@given(LINES, st.lists(st.integers(0, 30)))
def test_r17_delivery_does_not_matter(lines: list[bytes], sizes: list[int]) -> None:
    """Any cutting of the stream gives the same frames as one write."""
    splitter = FrameSplitter()
    stream = b"".join(line + b"\n" for line in lines)
    assert [frame for piece in in_pieces(stream, sizes) for frame in splitter.feed(piece)] == lines
    assert splitter.pending_bytes == 0


def test_r17_a_thousand_in_one_write_equal_byte_by_byte() -> None:
    """1,000 frames in one write and the same bytes one at a time give the same frames."""
    stream = b"".join(b'{"id":%d}\n' % n for n in range(1000))
    slow = FrameSplitter()
    one_by_one = [frame for byte in stream for frame in slow.feed(bytes([byte]))]
    assert FrameSplitter().feed(stream) == one_by_one
    assert len(one_by_one) == 1000


def test_half_a_frame_waits() -> None:
    """Bytes without a newline are kept, and counted."""
    splitter = FrameSplitter()
    assert splitter.feed(b'{"a"') == []
    assert splitter.pending_bytes == 4
    assert splitter.feed(b":1}\n") == [b'{"a":1}']


def test_a_line_of_exactly_the_limit_passes() -> None:
    """The limit counts the bytes before the newline."""
    splitter = FrameSplitter(limit=10)
    assert splitter.feed(b"x" * 10 + b"\n") == [b"x" * 10]
    assert not splitter.overflowed


@given(st.lists(st.integers(1, 30)))
def test_one_byte_more_is_too_large_however_it_arrives(sizes: list[int]) -> None:
    """Frames before the long line are given out, nothing after it is."""
    splitter = FrameSplitter(limit=10)
    stream = b"before\n" + b"x" * 11 + b"\nafter\n"
    frames = [frame for piece in in_pieces(stream, sizes) for frame in splitter.feed(piece)]
    assert frames == [b"before"]
    assert splitter.overflowed


def test_an_endless_line_costs_no_memory() -> None:
    """Once too long, what was held is dropped and what follows is swallowed."""
    splitter = FrameSplitter(limit=1024)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert splitter.pending_bytes <= 1024
    assert splitter.pending_bytes == 0


def test_the_error_names_the_limit() -> None:
    """What the other side is told says how long a line may be."""
    error = FrameSplitter(limit=10).error()
    assert (error.name, "10 bytes" in error.message) == ("frame_too_large", True)
    assert error.hint

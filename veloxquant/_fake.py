"""A stand-in for the daemon, shipped for the tests of inference servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import NotAnswering, NotRunning, VeloxError
from veloxquant.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class FakeTransport:
    """Stands in for the daemon in users' tests: Client(transport=FakeTransport({"plan": answer}), fallback=False).

    `answers` maps a call's name to its result (anything JSON can hold, or a Plan), to a VeloxError that the daemon
    would answer with, or to a function of the params that returns one of these. NotRunning and NotAnswering are raised
    as if there were no daemon. `calls` lists what was asked, as (name, params).
    """

    def __init__(self, answers: Mapping[str, Any] | None = None, *, notices: Sequence[Mapping[str, Any]] = ()) -> None:
        self.answers = dict(answers or {})
        self.notices = tuple(notices)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def exchange(self, frame: bytes, deadline: float) -> bytes:
        """The answer for the call in the frame."""
        envelope = messages.decode_envelope(frame)
        params: dict[str, Any] = msgspec.json.decode(envelope.params)
        self.calls.append((envelope.method, params))
        try:
            messages.decode_params(envelope.method, envelope.params)
        except VeloxError as error:
            return messages.encode_error(envelope.id, error)
        answer = self.answers.get(envelope.method, NotRunning("the fake transport has no answer for this call"))
        if callable(answer):
            answer = answer(params)
        if isinstance(answer, (NotRunning, NotAnswering)):
            raise answer
        if isinstance(answer, VeloxError):
            return messages.encode_error(envelope.id, answer)
        return messages.encode_result(envelope.id, answer)

    def stream(self, frame: bytes, deadline: float) -> Iterator[bytes]:
        """The answer to `subscribe`, then each notice."""
        self.calls.append(("subscribe", msgspec.json.decode(messages.decode_envelope(frame).params)))
        yield from (messages.encode_notice("notice", notice).rstrip(b"\n") for notice in self.notices)

    def close(self) -> None:
        """Nothing is held."""

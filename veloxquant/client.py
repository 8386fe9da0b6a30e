"""An inference server's only door: ask the daemon, try again, else plan in this process and say so.

A call ends within its time limit with an answer or a typed error, whatever the daemon does. Importing this module
loads neither mlx nor the planner.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from veloxquant._fake import FakeTransport
from veloxquant._question import Model, Workload, finite, question
from veloxquant._transport import SocketTransport, Transport
from veloxquant.errors import (
    InvalidParams,
    NotAnswering,
    NotRunning,
    Overloaded,
    ProtocolUnsupported,
    ShuttingDown,
    VeloxError,
)
from veloxquant.profiles import WorkloadProfile
from veloxquant.wire import messages
from veloxquant.wire.codes import from_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from veloxquant._fallback import LocalPlanner
    from veloxquant.config import Config
    from veloxquant.planner.fit import FitTable
    from veloxquant.planner.result import Plan

__all__ = ["Client", "FakeTransport"]

T = TypeVar("T")


class Client:
    """Ask for plans. Usable from many threads, after a fork, and as a context manager.

    `socket`: the daemon's socket; None means where the configuration says. `timeout_s`: the limit of one call, fallback
    included. `fallback`: plan in this process when no daemon answers; such a plan has `source` "local". `wait_s`: how
    long to wait for a daemon that is not there yet. `transport`: for tests, see FakeTransport.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 30.0,
        fallback: bool = True,
        wait_s: float = 0.0,
        config: Config | None = None,
        transport: Transport | None = None,
    ) -> None:
        if not timeout_s > 0 or not math.isfinite(timeout_s):
            raise InvalidParams(
                f"timeout_s is {timeout_s!r}, which is no finite time above 0", hint="give seconds", field="timeout_s"
            )
        self._socket = socket
        self._timeout_s = timeout_s
        self._fallback = fallback
        self._wait_s = wait_s
        self._config = config
        self._transport = transport
        self._ids = itertools.count(1)
        self._local: LocalPlanner | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections. The client stays usable and connects again when asked."""
        if self._transport is not None:
            self._transport.close()

    @property
    def socket(self) -> Path:
        """The path that is asked. Raises ConfigInvalid, SocketRefused."""
        if self._socket is not None:
            from veloxquant.paths import socket_path

            return socket_path(os.path.abspath(self._socket), {})  # noqa: PTH100 -- keeps links, as the daemon does
        from veloxquant.config import load, socket_of

        return socket_of(self._config or load())

    def plan(
        self,
        model: Model,
        workload: Workload = None,
        *,
        hardware: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        methods: Sequence[str] | None = None,
        timeout_s: float | None = None,
        **workload_fields: Any,
    ) -> Plan:
        """Which KV cache for this model and workload.

        `model`: a folder (path or text), an id "org/name" of the local hub cache, a config as a mapping, or the
        protocol's own mapping. `workload`: a WorkloadProfile or its fields as a mapping; single fields may be given by
        name: plan(model, context_length=32768, objective="memory"). `hardware`: overrides as in docs/protocol.md.
        Raises RequestError, ModelError, MethodError for wrong input, DaemonError when nobody can answer.
        """
        from veloxquant.planner.result import SCHEMA, Plan

        params = question(
            model,
            workload,
            workload_fields=workload_fields,
            hardware=hardware,
            engine=engine,
            memory_budget_bytes=memory_budget_bytes,
            methods=methods,
        )
        raw = self._ask("plan", params, timeout_s)
        return raw if isinstance(raw, Plan) else _checked(raw, Plan, SCHEMA)

    def fit(
        self,
        model: Model,
        workload: Workload = None,
        *,
        hardware: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        methods: Sequence[str] | None = None,
        timeout_s: float | None = None,
        **workload_fields: Any,
    ) -> FitTable:
        """The largest context per variant at 1, 2, 4 and 8 slots; takes what `plan` takes, without a context."""
        from veloxquant.planner.fit import SCHEMA, FitTable

        params = question(
            model,
            workload,
            workload_fields=workload_fields,
            hardware=hardware,
            engine=engine,
            memory_budget_bytes=memory_budget_bytes,
            methods=methods,
        )
        if isinstance(workload, WorkloadProfile):
            params["workload"].pop("context_length", None)
        raw = self._ask("fit", params, timeout_s)
        return raw if isinstance(raw, FitTable) else _checked(raw, FitTable, SCHEMA)

    def explain(self, plan: Plan | str, label: str | None = None, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """Sentences with the arithmetic behind a plan's choice, or behind one variant of it.

        `plan`: a plan, explained in this process, or the plan_id of one that the daemon remembers. Raises PlanNotFound.
        """
        if isinstance(plan, str):
            params = {"plan_id": plan} if label is None else {"plan_id": plan, "label": label}
            return _checked(self._ask("explain", params, timeout_s, local=False), _Explanation).sentences
        from veloxquant.planner.explain import explain

        return explain(plan, label)

    def methods(self, name: str | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Which methods are ready and which are quarantined, with reasons."""
        return self._mapping("methods", {} if name is None else {"name": name}, timeout_s)

    def records(self, *, timeout_s: float | None = None, **filters: Any) -> dict[str, Any]:
        """A page of the benchmark directory: filters as in docs/protocol.md (limit, offset, method, skipped...)."""
        return self._mapping("records", filters, timeout_s)

    def hardware(self, overrides: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The machine as plans see it, or as if it were another."""
        return self._mapping("hardware", {} if overrides is None else {"hardware": dict(overrides)}, timeout_s)

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """How the daemon is. Raises NotRunning, NotAnswering."""
        return self._mapping("status", {}, timeout_s, local=False)

    def ping(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """That the daemon answers. Raises NotRunning, NotAnswering."""
        return self._mapping("ping", {}, timeout_s, local=False)

    def hello(self, want: Sequence[str] = (), *, timeout_s: float | None = None) -> dict[str, Any]:
        """Who answers and what it can do. Raises ProtocolUnsupported when we share no protocol version."""
        from veloxquant import __version__

        params = {"client": f"veloxquant {__version__}", "protocol": [messages.PROTOCOL], "want": list(want)}
        answer = self._mapping("hello", params, timeout_s, local=False)
        if answer.get("protocol") != messages.PROTOCOL:
            raise ProtocolUnsupported(
                f"the daemon speaks protocol {answer.get('protocol')!r}, this client {messages.PROTOCOL}",
                hint="install the same veloxquant version on both sides",
                field="protocol",
            )
        return answer

    def reload(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Have the daemon read its configuration and plugins again. Raises NotRunning, ConfigInvalid."""
        return self._mapping("reload", {}, timeout_s, local=False)

    def shutdown(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Stop the daemon. Raises NotRunning."""
        return self._mapping("shutdown", {}, timeout_s, local=False)

    def subscribe(
        self, topics: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Notices as they come, the full state first; ends with NotAnswering when the daemon goes."""
        params = {} if topics is None else {"topics": list(topics)}
        frame = messages.encode_request(next(self._ids), "subscribe", params)
        for line in self._door().stream(frame, self._deadline(timeout_s)):
            answer = messages.decode_answer(line)
            if answer.error is not msgspec.UNSET:
                raise from_object(answer.error)
            if answer.method is not None and answer.params is not msgspec.UNSET:
                yield messages.decode_result(answer.params, dict)

    def _mapping(
        self, method: str, params: Mapping[str, Any], timeout_s: float | None, *, local: bool = True
    ) -> dict[str, Any]:
        raw = self._ask(method, params, timeout_s, local=local)
        return _checked(raw, dict) if isinstance(raw, (bytes, msgspec.Raw)) else dict(raw)

    def _ask(self, method: str, params: Mapping[str, Any], timeout_s: float | None, *, local: bool = True) -> Any:
        """The daemon's result as raw JSON, or the fallback's as a value."""
        deadline = self._deadline(timeout_s)
        try:
            return self._daemon(method, params, deadline)
        except (_Unanswered, Overloaded, ShuttingDown) as trouble:
            error = trouble.error if isinstance(trouble, _Unanswered) else trouble
            if not (local and self._fallback):
                raise error from None
            return self._locally(method, params, deadline, error)

    def _daemon(self, method: str, params: Mapping[str, Any], deadline: float) -> msgspec.Raw:
        request_id = next(self._ids)
        frame = messages.encode_request(request_id, method, finite(params))
        try:
            answer = _matching(messages.decode_answer(self._door().exchange(frame, deadline)), request_id)
        except (NotRunning, NotAnswering) as error:
            raise _Unanswered(error) from None
        if answer.error is not msgspec.UNSET:
            raise from_object(answer.error)
        return answer.result if answer.result is not msgspec.UNSET else msgspec.Raw(b"null")

    def _locally(self, method: str, params: Mapping[str, Any], deadline: float, why: VeloxError) -> Any:
        """The answer of this process, within what is left of the time."""
        if self._local is None:
            from veloxquant._fallback import LocalPlanner

            self._local = LocalPlanner(self._config)
        left = deadline - time.monotonic()
        if left <= 0:
            raise why
        return self._local.answer(method, params, left)

    def _door(self) -> Transport:
        if self._transport is None:
            self._transport = SocketTransport(self.socket, wait_s=self._wait_s)
        return self._transport

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


class _Unanswered(Exception):
    """The daemon gave no answer that could be read; `error` is what to raise when nothing else can be done."""

    def __init__(self, error: NotRunning | NotAnswering) -> None:
        super().__init__(error.message)
        self.error = error


class _Explanation(msgspec.Struct, frozen=True):
    sentences: tuple[str, ...]


def _matching(answer: messages.Answer, request_id: int) -> messages.Answer:
    """The answer, when it is to this request; an error may lack the id when the request could not be read."""
    if answer.id == request_id or (answer.id is None and answer.error is not msgspec.UNSET):
        return answer
    raise NotAnswering(
        f"the daemon answered request {answer.id!r} when {request_id} was asked",
        hint="check that the socket belongs to a veloxquant daemon",
    )


def _checked(raw: bytes | msgspec.Raw, kind: type[T], schema: str | None = None) -> T:
    """The result as its type; one of another schema comes from another protocol."""
    if schema is not None:
        found = messages.decode_result(raw, dict).get("schema")
        if found != schema:
            raise ProtocolUnsupported(
                f"the daemon answers in {found!r}, this client reads {schema}",
                hint="install the same veloxquant version on both sides",
            )
    return messages.decode_result(raw, kind)

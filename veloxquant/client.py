"""An inference server's only door: ask the daemon, try again, else plan in this process and say so.

A call ends within its time limit with an answer or a typed error, whatever the daemon does. Importing this module
loads neither mlx nor the planner.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from veloxquant._fake import FakeTransport
from veloxquant._limit import within
from veloxquant._question import Model, Workload, finite, question
from veloxquant._transport import SocketTransport, Transport
from veloxquant.errors import (
    ConfigInvalid,
    InvalidParams,
    NotAnswering,
    NotRunning,
    Overloaded,
    ProtocolUnsupported,
    ShuttingDown,
    UnknownMethod,
    VeloxError,
    quoted,
)
from veloxquant.profiles import HardwareProfile, WorkloadProfile
from veloxquant.wire import answers, messages
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

FALLBACK_SHARE, FALLBACK_S = 0.25, 5.0
"""What of a call's limit is kept for planning in this process: this share, at most so many seconds."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Client:
    """Ask for plans. Usable from many threads, after a fork, and as a context manager.

    `socket`: the daemon's socket; None means where the configuration says. `timeout_s`: the limit of one call, fallback
    included, by the clock on the wall. `fallback`: plan in this process when no daemon answers, or one that does not
    know the call or speaks another schema; such a plan has `source` "local". `wait_s`: how long to wait for a daemon
    that is not there yet. `transport`: for tests, see FakeTransport.
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
        self._socket = socket
        self._timeout_s = _seconds("timeout_s", timeout_s)
        self._fallback = fallback
        self._wait_s = _seconds("wait_s", wait_s)
        self._config = config
        self.transport = transport
        self._ids = itertools.count(1)
        self._local: LocalPlanner | None = None
        self._said = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fallback_reason(self) -> VeloxError | None:
        """Why this thread's last answer came from this process, None when the daemon gave it."""
        return getattr(self._said, "reason", None)

    def close(self) -> None:
        """Let go of connections; a call under way in another thread keeps its own.

        The client stays usable and connects again when asked.
        """
        if self.transport is not None:
            self.transport.close()

    @property
    def socket(self) -> Path:
        """The path that is asked. With a wrong configuration that of the environment, else the platform's default.

        A daemon that runs is not missed for a setting that only planning here would need. Raises SocketRefused.
        """
        from veloxquant.paths import socket_path

        if self._socket is not None:
            return socket_path(os.path.abspath(self._socket), {})  # noqa: PTH100 -- keeps links, as the daemon does
        from veloxquant.config import load, socket_of

        try:
            return socket_of(self._config or load())
        except ConfigInvalid as error:
            place = socket_path()
            _log.warning("%s; the daemon is asked at %s", error.message, place)
            return place

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
        name: plan(model, context_length=32768, objective="memory"). `hardware`: facts in place of this machine's: chip,
        gpu_cores, total_memory_bytes, working_set_bytes, active_bytes, max_buffer_bytes, bandwidth_gbps, versions.
        Raises RequestError, ModelError, MethodError for wrong input, DaemonError when nobody can answer.
        """
        from veloxquant.planner.result import SCHEMA, Plan

        params = question(model, workload, workload_fields, hardware, engine, memory_budget_bytes, methods)
        return self._typed("plan", params, Plan, timeout_s, schema=SCHEMA)

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

        params = question(model, workload, workload_fields, hardware, engine, memory_budget_bytes, methods)
        if isinstance(workload, WorkloadProfile):
            params["workload"].pop("context_length", None)
        return self._typed("fit", params, FitTable, timeout_s, schema=SCHEMA)

    def explain(self, plan: Plan | str, label: str | None = None, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """Sentences with the arithmetic behind a plan's choice, or behind one variant of it.

        `plan`: a plan, explained in this process, or the plan_id of one that the daemon remembers. Raises PlanNotFound.
        """
        if isinstance(plan, str):
            params = {"plan_id": plan} if label is None else {"plan_id": plan, "label": label}
            return self._typed("explain", params, answers.Explanation, timeout_s, local=False).lines
        from veloxquant.planner.explain import explain

        return explain(plan, label)

    def methods(self, name: str | None = None, *, timeout_s: float | None = None) -> answers.MethodList:
        """Which methods are ready and which are quarantined, with reasons. Raises MethodNotFound."""
        return self._typed("methods", {} if name is None else {"name": name}, answers.MethodList, timeout_s)

    def records(self, *, timeout_s: float | None = None, **filters: Any) -> answers.RecordPage:
        """A page of the benchmark directory: filters are the fields of `wire.params.RecordsParams`."""
        return self._typed("records", filters, answers.RecordPage, timeout_s)

    def hardware(
        self, overrides: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> HardwareProfile:
        """The machine as plans see it, or as if it were another."""
        params = {} if overrides is None else {"hardware": dict(overrides)}
        return self._typed("hardware", params, HardwareProfile, timeout_s)

    def status(self, *, timeout_s: float | None = None) -> answers.Status:
        """How the daemon is. Raises NotRunning, NotAnswering."""
        return self._typed("status", {}, answers.Status, timeout_s, local=False)

    def metrics(self, *, timeout_s: float | None = None) -> answers.Metrics:
        """The daemon's numbers for a Prometheus scraper. Raises NotRunning, UnknownMethod by an older daemon."""
        return self._typed("metrics", {}, answers.Metrics, timeout_s, local=False)

    def ping(self, *, timeout_s: float | None = None) -> answers.Pong:
        """That the daemon answers. Raises NotRunning, NotAnswering."""
        return self._typed("ping", {}, answers.Pong, timeout_s, local=False)

    def hello(self, want: Sequence[str] = (), *, timeout_s: float | None = None) -> answers.Hello:
        """Who answers and what it can do. Raises ProtocolUnsupported when we share no protocol version."""
        from veloxquant import __version__

        params = {"client": f"veloxquant {__version__}", "protocol": [messages.PROTOCOL], "want": list(want)}
        answer = self._typed("hello", params, answers.Hello, timeout_s, local=False)
        if answer.protocol != messages.PROTOCOL:
            raise ProtocolUnsupported(
                f"the daemon speaks protocol {answer.protocol}, this client {messages.PROTOCOL}",
                hint=messages.SAME_VERSION,
                field="protocol",
            )
        return answer

    def reload(self, *, timeout_s: float | None = None) -> answers.Reloaded:
        """Have the daemon read its configuration and plugins again. Raises NotRunning, ConfigInvalid."""
        return self._typed("reload", {}, answers.Reloaded, timeout_s, local=False)

    def shutdown(self, *, timeout_s: float | None = None) -> answers.Stopping:
        """Stop the daemon. Raises NotRunning."""
        return self._typed("shutdown", {}, answers.Stopping, timeout_s, local=False)

    def subscribe(
        self, topics: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> Iterator[answers.Notice]:
        """Notices as they come, the full state first; ends with NotAnswering when the daemon goes."""
        params = {} if topics is None else {"topics": list(topics)}
        frame = messages.encode_request(next(self._ids), "subscribe", params)
        for line in self._door().stream(frame, self._deadline(timeout_s)):
            answer = messages.decode_answer(line)
            if answer.error is not msgspec.UNSET:
                raise from_object(answer.error)
            if answer.method is not None and answer.params is not msgspec.UNSET:
                yield messages.decode_result(answer.params, answers.Notice)

    def _typed(
        self,
        method: str,
        params: Mapping[str, Any],
        kind: type[T],
        timeout_s: float | None,
        *,
        local: bool = True,
        schema: str | None = None,
    ) -> T:
        """The daemon's answer as its type, or the fallback's."""
        limit_s = self._timeout_s if timeout_s is None else _seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + limit_s
        local = local and self._fallback
        # Whatever keeps the daemon busy, or a hung one pretending, some of the time is for this process.
        kept_s = min(FALLBACK_SHARE * limit_s, FALLBACK_S) if local else 0.0
        self._said.reason = None
        try:
            return _of_schema(schema, self._daemon(method, params, kind, deadline - kept_s))
        except (_Unanswered, Overloaded, ShuttingDown, UnknownMethod, ProtocolUnsupported) as trouble:
            error = trouble.error if isinstance(trouble, _Unanswered) else trouble
            if not local:
                raise error from None
            self._said.reason = error
            found: T = self._locally(method, params, deadline, error)
            return found

    def _daemon(self, method: str, params: Mapping[str, Any], kind: type[T], deadline: float) -> T:
        request_id = next(self._ids)
        frame = messages.encode_request(request_id, method, finite(params))
        try:
            answer = _matching(messages.decode_answer(self._door().exchange(frame, deadline)), request_id)
            if answer.error is msgspec.UNSET:
                return messages.decode_result(b"null" if answer.result is msgspec.UNSET else answer.result, kind)
        except (NotRunning, NotAnswering) as error:
            # Whatever was wrong with that answer, the rest of its connection is not to be trusted either.
            self.close()
            raise _Unanswered(error) from None
        raise from_object(answer.error)

    def _locally(self, method: str, params: Mapping[str, Any], deadline: float, why: VeloxError) -> Any:
        """The answer of this process, within what is left of the time."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise why
        try:
            return within(left_s, lambda: self._planner().answer(method, params, deadline - time.monotonic()))
        except TimeoutError:
            raise NotAnswering(
                f"{why.message}; this process had no answer within the remaining {left_s:.1f} s either",
                hint="give it a longer timeout: a model's first plan takes some seconds",
            ) from None

    def _planner(self) -> LocalPlanner:
        if self._local is None:
            from veloxquant._fallback import LocalPlanner

            self._local = LocalPlanner(self._config)
        return self._local

    def _door(self) -> Transport:
        if self.transport is None:
            self.transport = SocketTransport(self.socket, wait_s=self._wait_s)
        return self.transport

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else _seconds("timeout_s", timeout_s))


class _Unanswered(Exception):
    """The daemon gave no answer that could be read; `error` is what to raise when nothing else can be done."""

    def __init__(self, error: NotRunning | NotAnswering) -> None:
        super().__init__(error.message)
        self.error = error


def _seconds(field: str, value: float) -> float:
    # Compared, since math.isfinite itself fails on a whole number that no float can hold.
    if isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max:
        return value
    message = f"{field} is {quoted(value)}, which is no finite time from 0 up"
    raise InvalidParams(message, hint="give seconds", field=field)


def _matching(answer: messages.Answer, request_id: int) -> messages.Answer:
    """The answer, when it is to this request; an error may lack the id when the request could not be read."""
    if answer.id == request_id or (answer.id is None and answer.error is not msgspec.UNSET):
        return answer
    raise NotAnswering(
        f"the daemon answered request {answer.id!r} when {request_id} was asked",
        hint="check that the socket belongs to a veloxquant daemon",
    )


def _of_schema(schema: str | None, answer: T) -> T:
    """The answer, when it follows the schema we read; one of another schema comes from another protocol."""
    found = getattr(answer, "schema", None)
    if schema is None or found == schema:
        return answer
    raise ProtocolUnsupported(
        f"the daemon answers in {quoted(found)}, this client reads {schema}",
        hint=messages.SAME_VERSION,
    )

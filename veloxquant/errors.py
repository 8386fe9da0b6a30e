"""Every error veloxquant raises, as one tree.

    VeloxError                 internal_error          exit 5
    ├── RequestError           what was asked is wrong exit 2
    │   ├── ParseError         parse_error
    │   ├── InvalidRequest     invalid_request
    │   ├── UnknownMethod      unknown_method
    │   ├── InvalidParams      invalid_params
    │   ├── FrameTooLarge      frame_too_large
    │   ├── ProtocolUnsupported protocol_unsupported   exit 4
    │   └── ConfigInvalid      config_invalid
    ├── ModelError             the model cannot be read
    │   ├── ModelNotFound      model_not_found
    │   ├── ModelConfigInvalid model_config_invalid
    │   ├── ModelNotSupported  model_not_supported
    │   └── EngineUnavailable  engine_unavailable
    ├── MethodError            a method cannot do this
    │   ├── MethodNotFound     method_not_found
    │   └── MethodRefused      method_refused
    ├── StoreError             the benchmark directory
    │   ├── RecordInvalid      record_invalid
    │   └── StoreUnavailable   store_unavailable
    ├── DaemonError            the daemon and its socket
    │   ├── SocketRefused      socket_refused
    │   ├── AlreadyRunning     already_running         exit 75
    │   ├── NotRunning         not_running             exit 3
    │   ├── NotAnswering       timeout                 exit 4
    │   ├── Overloaded         overloaded              exit 4
    │   ├── ShuttingDown       shutting_down           exit 4
    │   └── PlanNotFound       plan_not_found
    └── ServiceError           the background agent
        ├── ServiceUnavailable service_unavailable     exit 1
        ├── ServiceRefused     service_refused         exit 2
        └── ServiceFailed      service_failed          exit 1

`name` is stable and travels over the socket; the message says what and why; `hint` says what to do next.
"""

from __future__ import annotations

from typing import ClassVar

MAX_WHOLE = 2**53
"""The largest whole number that is taken: every reader of JSON keeps it exactly (RFC 8259, section 6), and no machine
has 8 PiB and no model 2**53 tokens."""


def quoted(value: object, most: int = 60) -> str:
    """An input as a message quotes it, on one short line. Never raises, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 -- a stranger's repr; and Python prints no number of more than 4,300 digits
        return "a value that cannot be printed"
    return text if len(text) <= most else f"{text[: most - 3]}..."


class VeloxError(Exception):
    """Base of all errors. `field` names the offending input where there is one."""

    name: ClassVar[str] = "internal_error"
    rpc_code: ClassVar[int] = -32603
    exit_code: ClassVar[int] = 5

    def __init__(self, message: str, *, hint: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field


class RequestError(VeloxError):
    """What was asked is wrong."""

    name = "invalid_request"
    rpc_code = -32600
    exit_code = 2


class ParseError(RequestError):
    """The bytes are not one JSON object in UTF-8."""

    name = "parse_error"
    rpc_code = -32700


class InvalidRequest(RequestError):
    """The JSON is not a JSON-RPC 2.0 request."""


class UnknownMethod(RequestError):
    """No such call on the socket."""

    name = "unknown_method"
    rpc_code = -32601


class InvalidParams(RequestError):
    """A field is missing, unknown, of the wrong type or out of range; `field` names it."""

    name = "invalid_params"
    rpc_code = -32602


class FrameTooLarge(RequestError):
    """A frame is longer than the protocol allows."""

    name = "frame_too_large"
    rpc_code = -32001


class ProtocolUnsupported(RequestError):
    """Client and daemon share no protocol version."""

    name = "protocol_unsupported"
    rpc_code = -32002
    exit_code = 4


class ConfigInvalid(RequestError):
    """The configuration file, an environment variable or a flag is wrong; `field` is the key.

    `variable` names the environment variable that is wrong. It is None for a file or a flag, and is not sent.
    """

    name = "config_invalid"
    rpc_code = -32003

    def __init__(self, message: str, *, hint: str = "", field: str | None = None, variable: str | None = None) -> None:
        super().__init__(message, hint=hint, field=field)
        self.variable = variable


class ModelError(VeloxError):
    """The model cannot be read."""

    rpc_code = -32010
    exit_code = 2


class ModelNotFound(ModelError):
    """No such folder, and no such id in the local hub cache."""

    name = "model_not_found"
    rpc_code = -32011


class ModelConfigInvalid(ModelError):
    """config.json is missing, is not JSON, or the engine refuses its fields."""

    name = "model_config_invalid"
    rpc_code = -32012


class ModelNotSupported(ModelError):
    """The engine has no such model_type and the static reader does not understand it."""

    name = "model_not_supported"
    rpc_code = -32013


class EngineUnavailable(ModelError):
    """mlx-lm is not installed, or not in the version asked for."""

    name = "engine_unavailable"
    rpc_code = -32014


class MethodError(VeloxError):
    """A method cannot do this."""

    rpc_code = -32020
    exit_code = 2


class MethodNotFound(MethodError):
    """No method of that name is ready."""

    name = "method_not_found"
    rpc_code = -32021


class MethodRefused(MethodError):
    """The method cannot serve this layer, width or model; raised before any token is processed."""

    name = "method_refused"
    rpc_code = -32022


class StoreError(VeloxError):
    """The benchmark directory."""

    rpc_code = -32030
    exit_code = 1


class RecordInvalid(StoreError):
    """A benchmark record holds an impossible value; `field` names it."""

    name = "record_invalid"
    rpc_code = -32031


class StoreUnavailable(StoreError):
    """The benchmark directory cannot be read or written (full disk, read-only, not a folder)."""

    name = "store_unavailable"
    rpc_code = -32032


class DaemonError(VeloxError):
    """The daemon and its socket."""

    rpc_code = -32040


class SocketRefused(DaemonError):
    """The socket path is too long, not ours, not a socket, or its folder is not private."""

    name = "socket_refused"
    rpc_code = -32041
    exit_code = 2


class AlreadyRunning(DaemonError):
    """Another daemon holds the lock."""

    name = "already_running"
    rpc_code = -32042
    exit_code = 75


class NotRunning(DaemonError):
    """Nothing listens on the socket."""

    name = "not_running"
    rpc_code = -32043
    exit_code = 3


class NotAnswering(DaemonError):
    """No answer within the time limit, or an answer that is not the protocol."""

    name = "timeout"
    rpc_code = -32044
    exit_code = 4


class Overloaded(DaemonError):
    """The daemon has more work than it accepts; ask again."""

    name = "overloaded"
    rpc_code = -32045
    exit_code = 4


class ShuttingDown(DaemonError):
    """The daemon is stopping and takes no new requests."""

    name = "shutting_down"
    rpc_code = -32046
    exit_code = 4


class PlanNotFound(DaemonError):
    """No plan of that id is remembered."""

    name = "plan_not_found"
    rpc_code = -32047
    exit_code = 1


class ServiceError(VeloxError):
    """The background agent: launchd's or systemd's."""

    rpc_code = -32050
    exit_code = 1


class ServiceUnavailable(ServiceError):
    """This user has no launchd and no systemd that could run an agent."""

    name = "service_unavailable"
    rpc_code = -32051


class ServiceRefused(ServiceError):
    """What was asked cannot be installed or removed: a program that does not run, a file that is not ours."""

    name = "service_refused"
    rpc_code = -32052
    exit_code = 2


class ServiceFailed(ServiceError):
    """The manager did not do what it was asked to do; the message has its words and what they mean."""

    name = "service_failed"
    rpc_code = -32053

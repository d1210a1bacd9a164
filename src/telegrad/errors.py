"""The exceptions that Telegrad raises.

    TelegradError
    ├── UsageError           the API was used in a way that it does not allow
    │   │                    (also a ValueError)
    │   └── ArgumentTypeError   an argument has the wrong type
    │                           (also a TypeError)
    ├── RemoteError          the remote function raised an exception that cannot be rebuilt here
    ├── WorkersFailed        several workers failed; `failures` has their errors by worker
    ├── WorkerExited         a process that `launch` started ended with an error; `exit_code`, `log`
    ├── CallTimeout          the deadline of a call passed
    │                        (also a TimeoutError)
    ├── CallCancelled        the call was cancelled
    │                        (also a concurrent.futures.CancelledError)
    ├── QueueFull            the queue of a batched function is full
    ├── PeerLost             the worker died, left or cannot be reached
    │   │                    (also a ConnectionError)
    │   └── GroupBroken      a barrier or gather failed; `missing` has the names of absent workers
    ├── JoinError            a worker could not join its group
    ├── ProtocolError        a peer sent bytes that violate the protocol
    │   └── AuthenticationError   a peer does not know the secret
    │       └── StoreTampered     an entry of the group's store is not one of its workers'
    ├── SerializationError   a value cannot be sent; `path` says which part of it
    ├── StaleReference       the object of a reference is gone, or its owner was restarted
    └── InternalError        a bug in Telegrad: please report it

`torch.distributed.rpc` raises `RuntimeError` in these cases, so each of these is a `RuntimeError`.
A remote exception that can be rebuilt is raised as its own type. Its `__cause__` is a
`RemoteTraceback`. All these errors can be pickled with their attributes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telegrad import plurals


class TelegradError(RuntimeError):
    """Base class of all errors of Telegrad.

    `peer` is the name of the worker that the error is about, `call` the function called there.
    """

    def __init__(
        self, message: str = "", *, peer: str | None = None, call: str | None = None
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.call = call

    def __reduce__(self) -> tuple[Callable[..., TelegradError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[TelegradError], args: tuple[Any, ...], state: dict[str, Any]
) -> TelegradError:
    # `RuntimeError.__new__`, the first in the MRO, rejects classes with the layout of an OSError.
    error: TelegradError = OSError.__new__(cls) if issubclass(cls, OSError) else cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(TelegradError, ValueError):
    """The API was used in a way that it does not allow."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that it cannot have."""


class RemoteError(TelegradError):
    """The remote function raised an exception that cannot be rebuilt here.

    `type_name` is the qualified name of its type, `traceback_text` the remote traceback.
    """

    def __init__(
        self,
        message: str = "",
        *,
        type_name: str = "",
        traceback_text: str = "",
        peer: str | None = None,
    ) -> None:
        super().__init__(message, peer=peer)
        self.type_name = type_name
        self.traceback_text = traceback_text


class RemoteTraceback(Exception):
    """The cause of an exception from another worker. It shows the remote traceback."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class WorkersFailed(TelegradError):
    """Several workers failed at the same operation. `failures` has their errors by worker."""

    def __init__(
        self, message: str = "", *, failures: Mapping[str, BaseException] | None = None
    ) -> None:
        super().__init__(message)
        self.failures: dict[str, BaseException] = dict(failures or {})

    @classmethod
    def of(cls, failures: Mapping[str, BaseException]) -> WorkersFailed:
        """Return an error whose message lists these errors."""
        lines = [f"\n  {name}: {type(error).__name__}: {error}" for name, error in failures.items()]
        workers = plurals.count(len(failures), "worker")
        return cls(f"{workers} failed:{''.join(lines)}", failures=failures)


class WorkerExited(TelegradError):
    """A process that `launch` started ended with an error, and could not be restarted again.

    `peer` is the name of the first worker that failed, `exit_code` that of its process (128 and the
    number of a signal that ended it), and `log` the file with its output.
    """

    def __init__(
        self, message: str = "", *, peer: str | None = None, exit_code: int = 1, log: str = ""
    ) -> None:
        super().__init__(message, peer=peer)
        self.exit_code = exit_code
        self.log = log


class CallTimeout(TelegradError, TimeoutError):
    """The deadline of a call passed before its reply arrived.

    `sent` is False if the call was not sent to the callee.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        call: str | None = None,
        sent: bool = True,
    ) -> None:
        super().__init__(message, peer=peer, call=call)
        self.sent = sent


class CallCancelled(TelegradError, concurrent.futures.CancelledError):
    """The call was cancelled."""


class QueueFull(TelegradError):
    """The queue of a batched function is full, and the function refuses further calls."""


class PeerLost(TelegradError, ConnectionError):
    """The other worker died, left, or cannot be reached.

    `leave_reason` is the reason that it sent before it left, if any. `sent` is False if the call
    was not sent to the callee. `expelled` is True if the other worker has declared this one lost,
    because it was silent for too long: to go on, this worker must join the group again.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        call: str | None = None,
        leave_reason: str = "",
        sent: bool = True,
        expelled: bool = False,
    ) -> None:
        super().__init__(message, peer=peer, call=call)
        self.leave_reason = leave_reason
        self.sent = sent
        self.expelled = expelled


class GroupBroken(PeerLost):
    """A barrier or gather ended before all workers took part. `missing` has their names."""

    def __init__(self, message: str = "", *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)


class JoinError(TelegradError):
    """A worker could not join its group."""


class ProtocolError(TelegradError):
    """A peer sent bytes that violate the protocol. The connection is closed."""


class AuthenticationError(ProtocolError):
    """A peer did not prove that it knows the secret of the group."""


class StoreTampered(AuthenticationError):
    """An entry of the group's store was forged, put back or removed. It is not used."""


class SerializationError(TelegradError, TypeError):
    """A value cannot be sent.

    `path` is the path to it, such as `args[0]['model'].lock` or `result[1]`.
    """

    def __init__(
        self, message: str = "", *, path: str = "", peer: str | None = None, call: str | None = None
    ) -> None:
        super().__init__(message, peer=peer, call=call)
        self.path = path


class StaleReference(TelegradError, LookupError):
    """The object of a reference no longer exists."""


class InternalError(TelegradError):
    """Telegrad is in a state that should be impossible. Please report it."""


def error_text(error: BaseException) -> str:
    """Return `str(error)`. If that raises, return a text that says so.

    This function never raises, although `__str__` may be code of the user.
    """
    try:
        return "".join(str(error))  # a plain str, even if `__str__` returned a subclass
    except BaseException as failure:
        message = ", ".join(arg for arg in failure.args if type(arg) is str)
        return f"<str() of the {type(error).__name__} raised {type(failure).__name__}({message})>"


def as_exception(error: BaseException) -> Exception:
    """Return `error` if it is an `Exception`, else a `RemoteError` that names it.

    A future cannot hold a `SystemExit` or `KeyboardInterrupt`.
    """
    if isinstance(error, Exception):
        return error
    name = type(error).__qualname__
    wrapped = RemoteError(f"{name}: {error_text(error)}", type_name=name)
    wrapped.__cause__ = error
    return wrapped

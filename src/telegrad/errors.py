"""Everything Telegrad raises, split by whose fault it is.

    TelegradError
    ├── UsageError           you broke a rule of the API                 (also RuntimeError and ValueError)
    ├── RemoteError          the remote function raised and its exception cannot be rebuilt here
    ├── WorkersFailed        several workers failed at one thing; `failures` holds all their errors, by name
    ├── CallTimeout          the deadline of a call passed               (also TimeoutError)
    ├── CallCancelled        somebody cancelled the call                 (also concurrent.futures.CancelledError)
    ├── QueueFull            too many calls of a batched function wait already
    ├── PeerLost             the worker died, left or cannot be reached  (also ConnectionError)
    │   └── GroupBroken      a barrier or gather could not be completed; `missing` names who was not there
    ├── JoinError            a worker could not join its group
    ├── ProtocolError        a peer sent bytes that break the protocol
    │   └── AuthenticationError   a peer does not know the secret
    ├── SerializationError   a value cannot travel; says which one, by its path
    ├── StaleReference       a reference to an object that is gone, or to an earlier life of its owner
    └── InternalError        this should never happen: please report it

Where `torch.distributed.rpc` raises `RuntimeError`, ours is a `RuntimeError` too, so all of them are.
A remote exception that can be rebuilt arrives as its own type; its `__cause__` is a `RemoteTraceback`.
All errors pickle with their attributes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class TelegradError(RuntimeError):
    """Root of all errors. `peer` is the worker concerned, `call` what was being called there."""

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
    # RuntimeError comes first in the MRO, but its __new__ refuses classes that are laid out as an OSError.
    error: TelegradError = OSError.__new__(cls) if issubclass(cls, OSError) else cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(TelegradError, ValueError):
    """The API was used in a way it does not allow."""


class RemoteError(TelegradError):
    """The remote function raised something that cannot be rebuilt here.

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
    """The cause of an exception that came from another worker: where it was raised, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class WorkersFailed(TelegradError):
    """Several workers failed at what was asked of all. `failures` holds their errors, by the workers' names."""

    def __init__(
        self, message: str = "", *, failures: Mapping[str, BaseException] | None = None
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})

    @classmethod
    def of(cls, failures: Mapping[str, BaseException]) -> WorkersFailed:
        lines = [f"\n  {name}: {type(error).__name__}: {error}" for name, error in failures.items()]
        return cls(f"{len(failures)} workers failed:{''.join(lines)}", failures=failures)


class CallTimeout(TelegradError, TimeoutError):
    """The deadline of a call passed before its reply arrived. `sent` is False if the callee never heard of the call."""

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
    """Too many calls wait already, and the function was told to refuse more."""


class PeerLost(TelegradError, ConnectionError):
    """The other worker died, left, or cannot be reached. `last_words` is what it said before it went, if anything.

    `sent` is False if the callee never heard of the call.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        call: str | None = None,
        last_words: str = "",
        sent: bool = True,
    ) -> None:
        super().__init__(message, peer=peer, call=call)
        self.last_words = last_words
        self.sent = sent


class GroupBroken(PeerLost):
    """A barrier or gather ended without everybody. `missing` holds their names."""

    def __init__(self, message: str = "", *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class JoinError(TelegradError):
    """A worker could not join its group."""


class ProtocolError(TelegradError):
    """Bytes from a peer break the protocol; the connection is closed."""


class AuthenticationError(ProtocolError):
    """A peer could not prove that it knows the group's secret."""


class SerializationError(TelegradError, TypeError):
    """A value cannot be sent. `path` says where it stands, such as `args[0]['model'].lock`."""

    def __init__(
        self, message: str = "", *, path: str = "", peer: str | None = None, call: str | None = None
    ) -> None:
        super().__init__(message, peer=peer, call=call)
        self.path = path


class StaleReference(TelegradError, LookupError):
    """A reference whose object no longer exists."""


class InternalError(TelegradError):
    """A state that should be impossible. Please report it."""


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a text that says that it raised. Never raises: `__str__` may be the user's."""
    try:
        return "".join(str(error))  # exactly a str, whatever `__str__` returned
    except BaseException as failure:
        words = ", ".join(arg for arg in failure.args if type(arg) is str)
        return f"<str() of the {type(error).__name__} raised {type(failure).__name__}({words})>"


def as_exception(error: BaseException) -> Exception:
    """Return `error`, or a `RemoteError` that stands for a SystemExit or the like, which a future cannot hold."""
    if isinstance(error, Exception):
        return error
    name = type(error).__qualname__
    wrapped = RemoteError(f"{name}: {text_of(error)}", type_name=name)
    wrapped.__cause__ = error
    return wrapped

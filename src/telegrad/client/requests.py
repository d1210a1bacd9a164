"""The encoding of calls to one peer, and what the functions and errors of calls are named.

`RequestCodec` encodes the calls to one peer and decodes its replies. A function that can be pickled
by name is sent once per connection, with a function id that the sender chooses; later calls on this
connection send the id alone. `known_functions`, the ids that the peer knows on a connection,
belongs to the connection. What is pickled by value (lambdas, closures, bound methods) may change
between two calls, so it never gets an id and is pickled with the arguments.

State: one `FunctionTable` for each sending agent. It only grows, up to `MAX_FUNCTIONS`. It needs no
lock, because `dict.setdefault` and `next` of an `itertools.count` are atomic: if two threads add a
function at the same time, both get the entry of the first, and one id stays unused.
"""

from __future__ import annotations

import itertools
import pickle
import time
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from telegrad.errors import CallTimeout, SerializationError, error_text
from telegrad.messages import call_scope as scopes
from telegrad.messages.call_scope import CallScope
from telegrad.messages.device_routes import ANY_DEVICE, ANY_DEVICE_MARK
from telegrad.messages.packing import MessageContext, SharedArguments, pack, unpack
from telegrad.messages.remote_functions import (
    BY_REFERENCE,
    HIDDEN_ARGUMENTS,
    MAX_FUNCTIONS,
    Function,
    check_callable,
    describe,
)
from telegrad.messages.trace_context import append_trace, tracer
from telegrad.wire import codec
from telegrad.wire.frames import (
    DEFINES_FUNCTION,
    HAS_KEYWORDS,
    HAS_SCOPE,
    HAS_TRACE,
    INLINE_FUNCTION,
    Frame,
)

Args = tuple[Any, ...]
Request = tuple[int, int, bytes, list[memoryview]]  # function id, flags, body, buffers
_SMALL_DIFFERENCE = 0.02  # seconds


class FunctionTable:
    """The functions of a sender: function -> (function id, pickled function)."""

    def __init__(self) -> None:
        self._entries: dict[Function, tuple[int, bytes]] = {}
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"<FunctionTable {len(self._entries)} functions>"

    def find(self, function: Function) -> tuple[int, bytes] | None:
        """Return the id and the pickle of a function; None if it cannot have an id."""
        try:
            return self._entries[function]
        except KeyError:
            if _is_pickled_by_reference(function):
                return self._add(function)
        except TypeError:  # not hashable
            pass
        check_callable(function)
        return None

    def _add(self, function: Function) -> tuple[int, bytes] | None:
        try:
            definition = pickle.dumps(function, 5)
        except Exception:
            return None  # it cannot be imported by its name: the codec sends it by value
        function_id = next(self._ids)
        if function_id > MAX_FUNCTIONS:
            return None
        return self._entries.setdefault(function, (function_id, definition))


def _is_pickled_by_reference(function: Function) -> bool:
    if isinstance(function, BuiltinFunctionType):
        return isinstance(function.__self__, ModuleType | type | None)
    return isinstance(function, FunctionType | MethodDescriptorType | type) or hasattr(
        type(function), BY_REFERENCE
    )


def defined_in_main(function: Function) -> bool:
    """Return whether a function is defined in `__main__`, which other processes cannot import."""
    return getattr(function, "__module__", None) == "__main__"


def _path_for_user(path: str, parts: list[str], function: Function) -> str:
    """Return the path to what cannot be sent, such as `[1]['x']` in these parts, as `args['x']`."""
    if not path:
        return "args"
    index, _, rest = path[1:].partition("]")
    part = parts[int(index)]
    if part == "args" and rest:
        index, _, rest = rest[1:].partition("]")
        rest = f"[{int(index) - getattr(function, HIDDEN_ARGUMENTS, 0)}]{rest}"
    return part + rest


class RequestCodec:
    """Encode calls to one incarnation of a peer, and decode its replies."""

    def __init__(
        self, context: MessageContext, function_table: FunctionTable, by_value: bool
    ) -> None:
        """With `by_value`, functions of `__main__` are sent by value: the peer has another one."""
        self._context = context
        self._exclusive_context = context._replace(exclusive=True)
        self._function_table = function_table
        self._by_value = by_value

    def encode(
        self,
        known_functions: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        retained: list[Any],
        scope: CallScope | None,
        exclusive: bool,
        shared: SharedArguments | None = None,
    ) -> Request:
        """Return a call as the parts of a frame.

        What must be kept alive until the callee has answered is added to `retained`. `exclusive`:
        the caller waits and does not write to its tensors meanwhile, so they need no copy.
        `shared`: the function is called with these arguments on other workers, too.
        """
        try:
            function_id, flags, body, buffers = self._encode(
                known_functions, function, args, kwargs, retained, exclusive, shared
            )
            scope_data = None if scope is None else scope.follow(self._context)
            if scope_data:
                flags |= HAS_SCOPE
                body = scopes.append_scope(body, scope_data)
            if tracer.current is not None:
                trace = tracer.current()
                if trace:
                    flags |= HAS_TRACE
                    body = append_trace(body, trace)
            return function_id, flags, body, buffers
        except SerializationError as error:
            error.peer, error.call = self._context.peer, describe(function)
            raise

    def _encode(
        self,
        known_functions: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        retained: list[Any],
        exclusive: bool,
        shared: SharedArguments | None,
    ) -> Request:
        entry = self._function_table.find(function)
        by_value = self._by_value
        context = self._exclusive_context if exclusive else self._context
        if hasattr(function, ANY_DEVICE_MARK):
            context = context._replace(route=ANY_DEVICE)
        is_inline = entry is None or (by_value and defined_in_main(function))
        value: Any = args
        flags = 0
        if is_inline:
            value = function, args, kwargs or {}
        elif kwargs:
            flags = HAS_KEYWORDS
            value = args, kwargs
        try:
            if shared is None:
                body, buffers = pack(context, value, by_value=by_value, retained=retained)
            else:
                body, buffers = shared.pack(context, value, by_value, retained)
        except SerializationError as error:
            parts = ["function", "args", "kwargs"] if is_inline else ["args", "kwargs"]
            path = error.path if is_inline or kwargs else f"[0]{error.path}"
            message = f"the call of {describe(function)} on worker {context.peer!r}"
            codec.locate(error, message, _path_for_user(path, parts, function))
            raise
        if is_inline:
            return 0, INLINE_FUNCTION, body, buffers
        assert entry is not None
        function_id, definition = entry
        if function_id not in known_functions:
            flags |= DEFINES_FUNCTION
            body = len(definition).to_bytes(4, "little") + definition + body
        return function_id, flags, body, buffers

    def decode(self, frame: Frame, call: str | Function, received: list[Any] | None = None) -> Any:
        """Return the result in a reply. Its resources are added to `received`."""
        try:
            if frame.receive_error is not None:
                raise frame.receive_error
            return unpack(self._context, frame.body, frame.buffers, received)
        except Exception as error:
            raise self.undecodable(call, error) from error

    def undecodable(self, call: str | Function, error: BaseException) -> SerializationError:
        """Return the error for a result that cannot be unpickled here."""
        name = call if isinstance(call, str) else describe(call)
        peer = self._context.peer
        failure = SerializationError(
            f"the result of {name} from worker {peer!r} could not be unpickled: "
            f"{type(error).__name__}: {error_text(error)}. "
            "Whatever it refers to must be importable here",
            peer=peer,
            call=name,
        )
        failure.__cause__ = error
        return failure


def time_left(timeout: float | None, until: float) -> float | None:
    """Return the seconds left of a timeout.

    A small difference is ignored, because setting a new timeout of a socket is a system call.
    """
    if timeout is None:
        return None
    left = until - time.monotonic()
    return timeout if timeout - left < _SMALL_DIFFERENCE else max(left, 0.0)


def timeout_error(peer: str, call: str, timeout: float | None, sent: bool = True) -> CallTimeout:
    """Return the error for a call that took longer than its timeout."""
    milliseconds = int((timeout or 0) * 1000)
    return CallTimeout(
        f"{call} on worker {peer!r}: RPC ran for more than set timeout ({milliseconds} ms) and "
        "will now be marked with an error. "
        "Give the call a larger timeout if it is meant to take so long",
        peer=peer,
        call=call,
        sent=sent,
    )

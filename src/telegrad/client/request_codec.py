"""`RequestCodec`: encode the calls to one peer, and decode its replies.

A function that can be pickled by name is sent once per connection, with a function id; later calls
send the id alone. Other functions are pickled with their arguments.

State: none that changes. `known_functions`, the function ids that the peer knows on a connection,
belongs to the connection.
"""

from __future__ import annotations

from typing import Any

from telegrad.errors import SerializationError, error_text
from telegrad.messages import call_scope as scopes
from telegrad.messages.call_scope import CallScope
from telegrad.messages.device_routes import ANY_DEVICE, ANY_DEVICE_MARK
from telegrad.messages.packing import MessageContext, pack, unpack
from telegrad.wire.frames import DEFINES_FUNCTION, HAS_KEYWORDS, HAS_SCOPE, INLINE_FUNCTION, Frame
from telegrad.wire.function_table import Function, FunctionTable, defined_in_main, describe

Args = tuple[Any, ...]
Request = tuple[int, int, bytes, list[memoryview]]  # function id, flags, body, buffers


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
    ) -> Request:
        """Return a call as the parts of a frame.

        What must be kept alive until the callee has answered is added to `retained`. `exclusive`:
        the caller waits and does not write to its tensors meanwhile, so they need no copy.
        """
        try:
            function_id, flags, body, buffers = self._encode(
                known_functions, function, args, kwargs, retained, exclusive
            )
            scope_data = None if scope is None else scope.follow(self._context)
            if scope_data:
                flags |= HAS_SCOPE
                body = scopes.append_scope(body, scope_data)
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
    ) -> Request:
        entry = self._function_table.find(function)
        by_value = self._by_value
        context = self._exclusive_context if exclusive else self._context
        if hasattr(function, ANY_DEVICE_MARK):
            context = context._replace(route=ANY_DEVICE)
        if entry is None or (by_value and defined_in_main(function)):
            call = function, args, kwargs or {}
            body, buffers = pack(context, call, by_value=by_value, retained=retained)
            return 0, INLINE_FUNCTION, body, buffers
        function_id, definition = entry
        flags = 0
        if kwargs:
            flags = HAS_KEYWORDS
            body, buffers = pack(context, (args, kwargs), by_value=by_value, retained=retained)
        else:
            body, buffers = pack(context, args, by_value=by_value, retained=retained)
        if function_id not in known_functions:
            flags |= DEFINES_FUNCTION
            body = len(definition).to_bytes(4, "little") + definition + body
        return function_id, flags, body, buffers

    def decode(self, frame: Frame, call: str | Function, received: list[Any] | None = None) -> Any:
        """Return the result in a reply. The resources in it is added to `received`."""
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

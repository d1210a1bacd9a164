"""`PeerFunctions`: the functions that a peer has defined on one connection.

The first call of a function on a connection carries its definition, later ones its id alone.
Loading a definition may import a module. If that takes long, another thread reads on and may find
calls of the same function, which wait until it is loaded.

State: `by_id`, the functions, and `_waiting`, the calls that wait for a function that is being
loaded, by function id. Both are changed under `_lock` of this module.
"""

from __future__ import annotations

import threading

from telegrad.current import ServedCall
from telegrad.errors import ProtocolError
from telegrad.messages.remote_functions import (
    MAX_FUNCTIONS,
    FunctionRegistry,
    ServedFunction,
    UndecodableFunction,
)
from telegrad.wire.frames import Frame

WaitingCall = tuple[Frame, ServedCall]
_lock = threading.Lock()


class PeerFunctions:
    """The functions of one connection. `registry` is that of the agent."""

    def __init__(self, registry: FunctionRegistry) -> None:
        self._registry = registry
        self.by_id: dict[int, ServedFunction] = {}
        self._waiting: dict[int, list[WaitingCall]] = {}

    def __repr__(self) -> str:
        return f"<PeerFunctions {len(self.by_id)} defined, {len(self._waiting)} being loaded>"

    def wait_for(self, frame: Frame, call: ServedCall) -> ServedFunction | None:
        """Return the function of a call. None: it is being loaded; `define` returns the call."""
        with _lock:
            waiting = self._waiting.get(frame.function_id)
            if waiting is not None:
                waiting.append((frame, call))
                return None
            function = self.by_id.get(frame.function_id)  # it may be defined by now
        if function is None:
            raise ProtocolError(
                f"received a call of function id {frame.function_id}, which was never defined"
            )
        return function

    def define(self, frame: Frame) -> tuple[ServedFunction, list[WaitingCall]]:
        """Load the function that a frame defines. Return it, and the calls that have waited."""
        # there was no memory for the body
        body_lost = frame.receive_error is not None and not len(frame.body)
        size = int.from_bytes(frame.body[:4], "little")
        is_valid = size <= len(frame.body) - 4 or body_lost
        if not 0 < frame.function_id <= MAX_FUNCTIONS or not is_valid:
            raise ProtocolError(
                f"received a definition of {size} bytes for function id {frame.function_id} in a "
                f"body of {len(frame.body)} bytes"
            )
        with _lock:
            self._waiting.setdefault(frame.function_id, [])
        try:
            if frame.receive_error is not None and body_lost:
                raise frame.receive_error
            # This may import a module. If that takes long, another thread leads the loop meanwhile.
            function = self._registry.decode(bytes(frame.body[4 : 4 + size]))
        except BaseException as error:
            function = ServedFunction(UndecodableFunction(error))
        with _lock:
            self.by_id[frame.function_id] = function
            return function, self._waiting.pop(frame.function_id, [])

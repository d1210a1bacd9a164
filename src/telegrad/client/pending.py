"""`PendingCall`: an asynchronous call that its callee has not answered."""

from __future__ import annotations

from typing import Any

from telegrad.errors import CallTimeout
from telegrad.futures import CompletionListener
from telegrad.messages.call_scope import CallScope


class PendingCall:
    """A call that its callee has not answered.

    A call ends when its callee has answered it or is lost, not when its caller no longer waits. So
    a deadline or a cancellation completes its future and marks it `abandoned`, and what the call
    uses (`retained`) is kept alive until the callee has answered.
    """

    __slots__ = (
        "abandoned",
        "call",
        "definition_lost",
        "internal",
        "listener",
        "retained",
        "scope",
        "sent",
        "timeout",
        "until",
    )

    def __init__(
        self,
        listener: CompletionListener,
        until: float,
        timeout: float | None,
        call: str,
        internal: bool,
        scope: CallScope | None,
        retained: list[Any],
    ) -> None:
        self.listener = listener
        self.until = until
        self.timeout = timeout
        self.call = call  # a description of the function
        self.internal = internal
        self.scope = scope
        self.retained = retained
        self.abandoned = False  # its caller no longer waits
        self.sent = False  # the callee may have received it
        self.definition_lost = False  # the callee does not know the function that it defined

    def abandon(self, error: Exception | None) -> None:
        """Complete the future with `error`; None: it was cancelled. The call itself goes on."""
        self.abandoned = True
        if error is not None:
            self.listener._try_complete(None, error)


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

"""`FutureReplies`: the calls that one future answers.

They are replied to together when it completes: the value is packed once and its buffers are copied
once for all of them.

State: `FutureReplies._replies` is changed under `_lock`, and None once the future is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from telegrad.locks import new_lock
from telegrad.messages.packing import SharedMessage

Reply = Callable[[Any, SharedMessage | None], None]
_ATTRIBUTE = "_telegrad_waiters"
_lock = new_lock()
_log = logging.getLogger(__name__)


class FutureReplies:
    """The calls that one future answers. They get the value that it has when it completes."""

    def __init__(self, reply: Reply) -> None:
        self._replies: list[Reply] | None = [reply]

    @classmethod
    def add(cls, future: Any, reply: Reply) -> None:
        """Call `reply(future, shared)` when the future completes, or at once if it is complete."""
        with _lock:
            others = getattr(future, _ATTRIBUTE, None)
            if others is not None and others._replies is not None:
                others._replies.append(reply)
                return
            replies = cls(reply)
            try:
                setattr(future, _ATTRIBUTE, replies)
            except AttributeError:
                # a future of torch without attributes: each of its calls is answered by itself
                pass
        future.add_done_callback(replies._complete)

    def _complete(self, done: Any) -> None:
        with _lock:
            replies, self._replies = self._replies or [], None
        shared = None
        if len(replies) > 1:
            try:
                shared = SharedMessage(done.value())
            except BaseException as error:  # each of the calls fails with it
                _log.debug("%d calls fail together: %s", len(replies), type(error))
        try:
            for reply in replies:
                reply(done, shared)
        finally:
            if shared is not None:
                shared.close()

"""Both sides of a handshake in one thread, with somebody in the middle who may change every
byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from telegrad.wire.handshake import HandshakeResult, Steps

Alter = Callable[[int, bytes], bytes]  # (position in the stream, bytes) -> bytes


class Stalled(Exception):
    """A side waits for bytes that never come; over a socket it would run into its time limit."""


@dataclass
class Side:
    """One side of a conversation, what it said, and how it ended."""

    steps: Steps
    said: bytes = b""
    wanted: int = 0
    _inbox: bytes = b""
    _started: bool = False
    _end: HandshakeResult | Exception | None = None

    def hear(self, data: bytes) -> bytes:
        """Give it bytes; what it says to them."""
        self._inbox += data
        answer = b""
        while self._end is None and len(self._inbox) >= self.wanted:
            taken, self._inbox = self._inbox[: self.wanted], self._inbox[self.wanted :]
            try:
                said, self.wanted = self.steps.send(taken) if self._started else next(self.steps)
                answer += said
            except StopIteration as done:
                self._end = done.value
            except Exception as error:
                self._end = error
            self._started = True
        self.said += answer
        return answer

    def outcome(self) -> HandshakeResult:
        """What the peer said about itself; raises what ended the handshake."""
        if self._end is None:
            raise Stalled(f"waits for {self.wanted} bytes and has {len(self._inbox)}")
        if isinstance(self._end, Exception):
            raise self._end
        return self._end


def unchanged(position: int, words: bytes) -> bytes:
    return words


def converse(
    client: Steps, server: Steps, up: Alter = unchanged, down: Alter = unchanged
) -> tuple[Side, Side]:
    """Let the two talk to their end.

    `up` may change what the client says, `down` what the server says.
    """
    near, far = Side(client), Side(server)
    far.hear(b"")
    words = near.hear(b"")
    while words:
        answer = far.hear(up(len(near.said) - len(words), words))
        words = near.hear(down(len(far.said) - len(answer), answer))
    return near, far

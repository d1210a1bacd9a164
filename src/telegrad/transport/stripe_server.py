"""`StripeServer`: let peers pull registered buffers, with one thread for each of their stripes.

State: `_registrations` (by id) is changed by single operations. Under `_lock`: `_stripes` (the
incarnation of each stripe's peer), `_last_seen` (when a stripe of a peer ended last) and
`_closed`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from telegrad.errors import ProtocolError, SerializationError
from telegrad.locks import new_lock
from telegrad.transport import stripes
from telegrad.transport.bulk import BulkPeer, Registration
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.host_image import find_image
from telegrad.transport.stripes import (
    CHECK,
    DESCRIBE,
    DONE,
    OK,
    PULL,
    REFUSED,
    REQUEST,
    STATUS,
    Stripe,
)
from telegrad.wire.handshake import Incarnation

_log = logging.getLogger(__name__)


class StripeServer:
    """The registrations of one agent, and the stripes over which peers pull them."""

    def __init__(self, connect_limit: float, resume_limit: float) -> None:
        """A peer gets nothing if it has no stripe for so many seconds, `connect_limit` at first."""
        self._connect_limit = connect_limit
        self._resume_limit = resume_limit
        # of another engine: describes a registration to a peer
        self.describe: Callable[[Registration], bytes] | None = None
        self._registrations: dict[int, Registration] = {}
        self._stripes: dict[Stripe, Incarnation] = {}
        self._last_seen: dict[Incarnation, float] = {}
        self._closed = False
        self._lock = new_lock()

    def __repr__(self) -> str:
        registrations, stripe_count = len(self._registrations), len(self._stripes)
        return f"<StripeServer {registrations} registrations, {stripe_count} stripes>"

    @property
    def registration_count(self) -> int:
        """The number of registrations that have not ended."""
        return len(self._registrations)

    @property
    def stripe_count(self) -> int:
        """The number of open stripes of all peers."""
        return len(self._stripes)

    # Registrations

    def register(self, peer: BulkPeer, buffers: Sequence[memoryview]) -> Registration:
        """Let a peer pull these buffers."""
        registration = Registration(peer, buffers)
        self._registrations[registration.registration_id] = registration
        return registration

    def withdraw(self, registration: Registration) -> None:
        """End a registration. The memory is not read any more when this returns.

        A chunk that is being sent is interrupted with its stripe. The bytes that were sent before
        are those of the registration, and the peer never receives the rest of the chunk.
        """
        self._registrations.pop(registration.registration_id, None)
        if registration.ended.is_set and registration.error is None:
            return  # the peer has everything
        registration.withdrawn = True
        stripes.shut(list(registration.readers))
        if registration.readers:
            registration.unread.wait()

    def check_reachable(self, registration: Registration) -> None:
        """Raise `SerializationError` if the peer has had no stripe for too long."""
        peer = registration.peer
        with self._lock:
            if peer.incarnation in self._stripes.values():
                return
            last_seen = self._last_seen.get(peer.incarnation)
        limit = self._connect_limit if last_seen is None else self._resume_limit
        if time.monotonic() - max(registration.created, last_seen or 0.0) > limit:
            raise SerializationError(
                f"worker {peer.name!r} has not received a large tensor: for {limit:g} s it had no "
                "bulk connection to this worker. Set TELEGRAD_ADVERTISE to an address of this "
                "worker that it can reach, or TELEGRAD_BULK_STREAMS=0",
                peer=peer.name,
            )

    # Stripes

    def serve(self, stripe: Stripe, incarnation: Incarnation) -> None:
        """Answer the requests of an authenticated peer until it closes the stripe."""
        with self._lock:
            if not self._closed:
                self._stripes[stripe] = incarnation
        try:
            if self._closed:
                return
            stripe.prepare()
            request = memoryview(bytearray(REQUEST.size))
            while True:
                stripe.receive(request)
                self._answer(stripe, incarnation, bytes(request))
        except (OSError, ProtocolError) as error:
            _log.debug("a bulk connection has ended: %s", error)
        finally:
            with self._lock:
                self._stripes.pop(stripe, None)
                self._last_seen[incarnation] = time.monotonic()
            stripe.close()

    def _answer(self, stripe: Stripe, incarnation: Incarnation, request: bytes) -> None:
        operation, index, registration_id, offset, length = REQUEST.unpack(request)
        registration = self._registrations.get(registration_id)
        if registration is not None and registration.peer.incarnation != incarnation:
            registration = None
        if operation == DONE:
            if registration is not None:
                registration.end(None)
            stripe.send(STATUS.pack(OK), request)
        elif operation == DESCRIBE and registration is not None and self.describe is not None:
            description = self.describe(registration)
            stripe.send(STATUS.pack(OK), request, more=True)
            stripe.send(STATUS.pack(len(description)), request, more=True)
            stripe.send(description, request)
        elif operation == CHECK and registration is not None and not registration.withdrawn:
            stripe.send(STATUS.pack(OK), request)
        elif operation != PULL or registration is None or index >= len(registration.buffers):
            stripe.send(STATUS.pack(REFUSED), request)
        else:
            self._send_chunk(stripe, registration, index, offset, length, request)

    def _send_chunk(
        self,
        stripe: Stripe,
        registration: Registration,
        index: int,
        offset: int,
        length: int,
        request: bytes,
    ) -> None:
        registration.readers.add(stripe)
        try:
            buffer = registration.buffers[index]
            chunk = buffer[offset : offset + length]
            if registration.withdrawn or chunk.nbytes != length:
                stripe.send(STATUS.pack(REFUSED), request)
                return
            image = find_image(buffer)
            if image is None:
                stripes.send_chunk(stripe, (chunk,), request)
            else:
                parts = image.parts(offset, offset + length)
                with contextlib.closing(parts):
                    stripes.send_chunk(stripe, parts, request)
        finally:
            registration.readers.discard(stripe)
            if registration.withdrawn and not registration.readers:
                registration.unread.set()

    # Closing

    def forget_peer(self, incarnation: Incarnation) -> None:
        """End the registrations and stripes of a lost peer."""
        with self._lock:
            ended = [stripe for stripe, peer in self._stripes.items() if peer == incarnation]
            self._last_seen.pop(incarnation, None)
        stripes.shut(ended)
        for registration in list(self._registrations.values()):
            if registration.peer.incarnation == incarnation:
                registration.end(ChannelClosed("the peer was lost"))

    def close(self) -> None:
        """End all registrations and stripes."""
        with self._lock:
            self._closed = True
            ended = list(self._stripes)
        stripes.shut(ended)
        for registration in list(self._registrations.values()):
            registration.end(ChannelClosed("this worker is shutting down"))

    def close_after_fork(self) -> None:
        """In the child of a fork: free this process's copies of the stripes."""
        for stripe in self._stripes:
            stripe.close()

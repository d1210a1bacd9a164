"""`StripeClient`: pull registered buffers from one peer over several stripes.

A pull is divided into chunks. Each stripe has a thread that takes chunks of all pulls in turn,
requests them and receives them into their memory. It requests the next chunk before it has received
the last one. Threads and stripes begin with the chunks that need them, and end when they were idle
for `_IDLE_SECONDS`.

If a stripe breaks, its chunks are requested again, over another stripe or after it was opened
again. A pull fails if no stripe could be used for a time, if the peer refuses a chunk, or if the
client is closed because the peer is lost.

State, under `_changed`: all of it, also that of the pulls. `_waiting` has the pulls that have
chunks to request, `_unfinished` all that have not ended.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport import stripes
from telegrad.transport.bulk import BulkPeer, OnPulled
from telegrad.transport.channel import SenderTimedOut
from telegrad.transport.host_image import find_image
from telegrad.transport.stripes import DONE, OK, PULL, REFUSED, REQUEST, STATUS, Stripe
from telegrad.wire.frames import BufferLocation

_IDLE_SECONDS = 30.0  # after which a stripe is closed
_MIN_CHUNK, _MAX_CHUNK = 1 << 19, 1 << 22  # bytes
_CHUNKS_PER_STRIPE = 4  # at least, in a pull of chunks that are larger than the smallest
_PIPELINE = 2  # requests of one stripe that have no response
_BACKOFF, _MAX_BACKOFF = 0.02, 1.0  # seconds between two attempts to open a stripe

_NO_MEMORY = memoryview(b"")
_log = logging.getLogger(__name__)


class _ChunkRequest:
    """A request, and the memory for its response."""

    __slots__ = ("data", "memory", "pull")

    def __init__(self, data: bytes, memory: memoryview, pull: StripedPull | None) -> None:
        self.data = data
        self.memory = memory
        self.pull = pull  # None: it tells the peer that a pull is done

    def receive(self, stripe: Stripe) -> None:
        """Receive the chunk. That for a device is received in parts."""
        image = find_image(self.memory)
        if image is None:
            stripe.receive_contents(self.memory, self.data, 0)
            return
        _, _, _, start, length = REQUEST.unpack(self.data)
        offset = 0
        with contextlib.closing(image.spaces(start, start + length)) as spaces:
            for space in spaces:
                stripe.receive_contents(space, self.data, offset)
                offset += space.nbytes


class StripedPull:
    """The buffers of one frame that are being received."""

    def __init__(
        self,
        client: StripeClient,
        bulk: Sequence[tuple[BufferLocation, memoryview]],
        chunk_bytes: int,
        on_pulled: OnPulled,
    ) -> None:
        self._client = client
        self.registration_id = bulk[0][0].offset
        self._on_pulled: OnPulled | None = on_pulled
        self.unrequested: collections.deque[_ChunkRequest] = collections.deque()
        for place, memory in bulk:
            for start in range(0, place.nbytes, chunk_bytes):
                part = memory[start : start + chunk_bytes]
                data = REQUEST.pack(PULL, place.bulk_index, place.offset, start, part.nbytes)
                self.unrequested.append(_ChunkRequest(data, part, self))
        self.missing = len(self.unrequested)  # chunks that were not received

    def __repr__(self) -> str:
        return f"<StripedPull {self.missing} chunks missing>"

    def cancel(self, error: BaseException) -> None:
        """End with this error, if it has not ended."""
        self._client.fail(self, error)

    def report(self, error: BaseException | None) -> None:
        """Call `on_pulled`, and forget it: it refers to the memory, and may refer to this pull."""
        on_pulled, self._on_pulled = self._on_pulled, None
        assert on_pulled is not None
        on_pulled(error)


class StripeClient:
    """The stripes to one peer, and the pulls that use them."""

    def __init__(
        self,
        peer: BulkPeer,
        open_stripe: Callable[[], Stripe],
        start_thread: Callable[[Callable[[], None]], None],
        count: int,
        connect_limit: float,
        resume_limit: float,
    ) -> None:
        """Use up to `count` stripes. `open_stripe` returns a new one.

        Pulls fail if no stripe could be used for `connect_limit` seconds at first, and for
        `resume_limit` seconds later.
        """
        self._peer = peer
        self._open_stripe = open_stripe
        self._start_thread = start_thread
        self._count = count
        self._limit = connect_limit
        self._resume_limit = resume_limit
        self._waiting: collections.deque[StripedPull] = collections.deque()
        self._unfinished: set[StripedPull] = set()
        self._notices: collections.deque[_ChunkRequest] = collections.deque()  # that pulls are done
        self._threads = 0
        self._idle_threads = 0
        self._open: set[Stripe] = set()
        self._failing_since: float | None = None  # since when no stripe could be used
        self._close_error: BaseException | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return (
            f"<StripeClient of {self._peer.name!r}: {len(self._open)} stripes, "
            f"{len(self._unfinished)} pulls>"
        )

    @property
    def pull_count(self) -> int:
        """The number of pulls that have not ended."""
        return len(self._unfinished)

    @property
    def stripe_count(self) -> int:
        """The number of open stripes."""
        return len(self._open)

    def pull(
        self, bulk: Sequence[tuple[BufferLocation, memoryview]], on_pulled: OnPulled
    ) -> StripedPull:
        """Receive registered buffers. Call `on_pulled(error)` once."""
        total = sum(place.nbytes for place, _ in bulk)
        chunk_bytes = total // (self._count * _CHUNKS_PER_STRIPE)
        chunk_bytes = min(max(chunk_bytes, _MIN_CHUNK), _MAX_CHUNK)
        pull = StripedPull(self, bulk, chunk_bytes, on_pulled)
        with self._changed:
            if not self._unfinished:
                self._failing_since = None
            self._unfinished.add(pull)
            if pull.unrequested:
                self._waiting.append(pull)
            error = self._close_error
        if error is not None:
            self.fail(pull, error)
        else:
            if not pull.missing:  # all of its buffers are empty
                self._finish(pull)
            self._use_stripes(max(pull.missing, 1))
        return pull

    def done(self, registration_id: int) -> None:
        """Tell the peer that a registration is not needed any more."""
        self._add_notice(registration_id)
        self._use_stripes(1)

    def fail(self, pull: StripedPull, error: BaseException) -> None:
        """End a pull with this error, if it has not ended.

        What was requested is still received, into memory that nobody else uses.
        """
        with self._changed:
            if pull not in self._unfinished:
                return
            self._unfinished.discard(pull)
            pull.unrequested.clear()
            if pull in self._waiting:
                self._waiting.remove(pull)
        pull.report(error)

    def close(self, error: BaseException) -> None:
        """End all pulls with this error, and all stripes."""
        with self._changed:
            self._close_error = error
            self._notices.clear()
            open_stripes = list(self._open)
            self._changed.notify_all()
        self._fail_all(error)
        stripes.shut(open_stripes)

    def close_after_fork(self) -> None:
        """In the child of a fork: free this process's copies of the stripes."""
        for stripe in self._open:
            stripe.close()

    # Threads

    def _use_stripes(self, requests: int) -> None:
        """Wake or start as many threads as new requests can use."""
        with self._changed:
            idle = self._idle_threads
            self._changed.notify(requests)
            new = max(min(self._count - self._threads, requests - idle), 0)
            self._threads += new
        for index in range(new):
            try:
                self._start_thread(self._run)
            except RuntimeError as error:  # the system refuses a thread
                with self._changed:
                    self._threads -= new - index
                    has_none = not self._threads
                if has_none:
                    self._fail_all(error)
                return

    def _run(self) -> None:
        """Use one stripe as long as there are requests. This runs on a thread of its own."""
        stripe: Stripe | None = None
        backoff = _BACKOFF
        try:
            while self._wait_for_request():
                try:
                    if stripe is None:
                        stripe = self._open_one()
                    self._exchange(stripe)
                    backoff = _BACKOFF
                except (OSError, ProtocolError) as error:
                    had_stripe = stripe is not None
                    self._close_one(stripe)
                    stripe = None
                    _log.debug("a bulk connection to %r failed: %s", self._peer.name, error)
                    if not self._retry(error, had_stripe, backoff):
                        return
                    backoff = min(2 * backoff, _MAX_BACKOFF)
        except BaseException as error:
            with self._changed:
                self._threads -= 1
            self._fail_all(error)
            raise
        finally:
            self._close_one(stripe)

    def _wait_for_request(self) -> bool:
        """Wait until there is something to request. Return False if this thread must end."""
        with self._changed:
            self._idle_threads += 1
            try:
                has_request = self._changed.wait_for(
                    lambda: self._waiting or self._notices or self._close_error is not None,
                    _IDLE_SECONDS,
                )
            finally:
                self._idle_threads -= 1
            if not has_request or self._close_error is not None:
                self._threads -= 1
                return False
            return True

    def _open_one(self) -> Stripe:
        stripe = self._open_stripe()
        with self._changed:
            if self._close_error is None:
                self._open.add(stripe)
        if stripe not in self._open:
            stripe.close()
            raise ConnectionError("the peer is lost")
        stripe.prepare()
        return stripe

    def _close_one(self, stripe: Stripe | None) -> None:
        if stripe is not None:
            with self._changed:
                self._open.discard(stripe)
            stripe.close()

    def _retry(self, error: BaseException, had_stripe: bool, backoff: float) -> bool:
        """Wait before a stripe is opened again. Return False if this thread must end."""
        now = time.monotonic()
        with self._changed:
            if self._failing_since is None:
                self._failing_since = now
            if self._close_error is not None or (self._open and not had_stripe):
                self._threads -= 1  # the other stripes go on
                return False
            if now - self._failing_since < self._limit:
                self._changed.wait_for(lambda: self._close_error is not None, backoff)
                return True
            self._threads -= 1
            self._failing_since = None
            self._notices.clear()
        seconds = self._limit
        self._fail_all(
            SerializationError(
                f"no bulk connection to worker {self._peer.name!r} at {self._peer.address} could "
                f"be used for {seconds:g} s ({error}). Set TELEGRAD_ADVERTISE there to an address "
                "that this worker can reach, or TELEGRAD_BULK_STREAMS=0",
                peer=self._peer.name,
            )
        )
        return False

    def _fail_all(self, error: BaseException) -> None:
        for pull in list(self._unfinished):
            self.fail(pull, error)

    # Requests

    def _exchange(self, stripe: Stripe) -> None:
        """Send requests and receive the responses until there are no more requests."""
        outstanding: collections.deque[_ChunkRequest] = collections.deque()
        status = memoryview(bytearray(STATUS.size))
        try:
            while True:
                new = self._take(_PIPELINE - len(outstanding))
                if new:
                    outstanding.extend(new)
                    for request in new:
                        stripe.send(request.data)
                if not outstanding:
                    return
                request = outstanding[0]
                stripe.receive(status, request.data)
                (value,) = STATUS.unpack(status)
                if value == OK:
                    request.receive(stripe)
                elif value != REFUSED:
                    raise ProtocolError(f"a response with the unknown status {value}")
                outstanding.popleft()
                self._end_request(request, value == OK)
        except BaseException:
            self._request_again(outstanding)
            raise

    def _take(self, count: int) -> list[_ChunkRequest]:
        """Return up to `count` requests to send: chunks of all pulls in turn."""
        taken: list[_ChunkRequest] = []
        with self._changed:
            while len(taken) < count and self._notices:
                taken.append(self._notices.popleft())
            while len(taken) < count and self._waiting:
                pull = self._waiting[0]
                taken.append(pull.unrequested.popleft())
                if pull.unrequested:
                    self._waiting.rotate(-1)
                else:
                    self._waiting.popleft()
        return taken

    def _request_again(self, requests: collections.deque[_ChunkRequest]) -> None:
        """Put requests back that got no response."""
        with self._changed:
            if self._close_error is not None:
                return
            for request in reversed(requests):
                pull = request.pull
                if pull is None:
                    self._notices.appendleft(request)
                elif pull in self._unfinished:
                    pull.unrequested.appendleft(request)
                    if pull not in self._waiting:
                        self._waiting.append(pull)
            self._changed.notify(len(requests))

    def _end_request(self, request: _ChunkRequest, accepted: bool) -> None:
        pull = request.pull
        with self._changed:
            self._failing_since = None
            self._limit = self._resume_limit
            if pull is None:
                return
            pull.missing -= accepted
            is_complete = pull.missing == 0 and pull in self._unfinished
        if not accepted:
            self.fail(pull, SenderTimedOut("its sender gave up sending it"))
        elif is_complete:
            self._finish(pull)

    def _finish(self, pull: StripedPull) -> None:
        """End a pull that has received everything, then let this or another thread tell."""
        with self._changed:
            if pull not in self._unfinished:
                return
            self._unfinished.discard(pull)
        pull.report(None)
        self._add_notice(pull.registration_id)

    def _add_notice(self, registration_id: int) -> None:
        notice = _ChunkRequest(REQUEST.pack(DONE, 0, registration_id, 0, 0), _NO_MEMORY, None)
        with self._changed:
            if self._close_error is None:
                self._notices.append(notice)

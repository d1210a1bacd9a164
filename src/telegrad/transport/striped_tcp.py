"""`StripedTcp`: the bulk engine that uses several TCP connections to each peer.

`stripe_server` serves the registrations of this worker, and `stripe_client` pulls those of one
peer.

State: `_clients` (by incarnation) and `_closed`, under `_lock`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from telegrad.locks import new_lock
from telegrad.transport.bulk import BulkEngine, BulkPeer, OnPulled, Pull, Registration
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.stripe_client import StripeClient
from telegrad.transport.stripe_server import StripeServer
from telegrad.transport.stripes import Stripe
from telegrad.wire.frames import BufferLocation
from telegrad.wire.handshake import Incarnation


class StripedTcp(BulkEngine):
    """Pull registered buffers over several connections at once."""

    def __init__(
        self,
        connect: Callable[[BulkPeer], Stripe],
        start_thread: Callable[[Callable[[], None]], None],
        stripes: int,
        connect_limit: float,
        resume_limit: float,
    ) -> None:
        """`connect` returns a new, authenticated stripe to a peer.

        A transfer fails if no stripe to the peer could be used for `connect_limit` seconds at
        first, and for `resume_limit` seconds later.
        """
        self._connect = connect
        self._start_thread = start_thread
        self._count = stripes
        self._limits = connect_limit, resume_limit
        self._server = StripeServer(*self._limits)
        self._clients: dict[Incarnation, StripeClient] = {}
        self._closed = False
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<StripedTcp {self._server!r}, {list(self._clients.values())}>"

    def counters(self) -> dict[str, int]:
        """Return what is in use now."""
        clients = list(self._clients.values())
        return {
            "bulk_registrations": self._server.registration_count,
            "bulk_pulls": sum(client.pull_count for client in clients),
            "bulk_stripes": self._server.stripe_count
            + sum(client.stripe_count for client in clients),
        }

    def register(self, peer: BulkPeer, buffers: Sequence[memoryview]) -> Registration:
        return self._server.register(peer, buffers)

    def withdraw(self, registration: Registration) -> None:
        self._server.withdraw(registration)

    def check_reachable(self, registration: Registration) -> None:
        self._server.check_reachable(registration)

    def serve_descriptions(self, describe: Callable[[Registration], bytes]) -> None:
        """Let another engine describe registrations to peers that ask for it."""
        self._server.describe = describe

    def serve(self, stripe: Stripe, incarnation: Incarnation) -> None:
        """Answer the requests of an authenticated peer until it closes the stripe."""
        self._server.serve(stripe, incarnation)

    def pull(
        self, peer: BulkPeer, bulk: Sequence[tuple[BufferLocation, memoryview]], on_pulled: OnPulled
    ) -> Pull:
        return self._client(peer).pull(bulk, on_pulled)

    def done(self, peer: BulkPeer, registration_id: int) -> None:
        self._client(peer).done(registration_id)

    def _client(self, peer: BulkPeer) -> StripeClient:
        with self._lock:
            client = self._clients.get(peer.incarnation)
            if client is None:
                client = StripeClient(
                    peer,
                    lambda: self._connect(peer),
                    self._start_thread,
                    self._count,
                    *self._limits,
                )
                if self._closed:
                    client.close(ChannelClosed("this worker is shutting down"))
                else:
                    self._clients[peer.incarnation] = client
            return client

    def forget_peer(self, incarnation: Incarnation) -> None:
        with self._lock:
            client = self._clients.pop(incarnation, None)
        if client is not None:
            client.close(ChannelClosed("the peer was lost"))
        self._server.forget_peer(incarnation)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close(ChannelClosed("this worker is shutting down"))
        self._server.close()

    def close_after_fork(self) -> None:
        """In the child of a fork: free this process's copies of the stripes."""
        for client in self._clients.values():
            client.close_after_fork()
        self._server.close_after_fork()

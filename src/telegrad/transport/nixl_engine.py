"""`NixlEngine`: a bulk engine for networks with RDMA, by the package `nixl`.

The receiver reads registered buffers from the memory of the sender, without its processor. It asks
for their description over a stripe, lets NIXL read them, and asks whether the registration was
valid until then: an adapter may read memory that its owner uses again. Whatever fails is pulled
over stripes instead.

NIXL does not encrypt. So this engine is used only without TLS, and only if there is an RDMA device
or ``Config.bulk_engine`` is "nixl".

State: `_lock` guards all use of the NIXL agent, `_described` (what NIXL knows of registrations, by
id), `_kept` (buffers that a peer may still read although they were withdrawn) and `_idle` (stripes
without a request).
"""

from __future__ import annotations

import importlib.util
import logging
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telegrad.config import Config
from telegrad.errors import ProtocolError, SerializationError, UsageError
from telegrad.free_threading import AtomicCounter
from telegrad.locks import new_lock
from telegrad.transport.bulk import BulkEngine, BulkPeer, OnPulled, Pull, Registration
from telegrad.transport.host_image import fill_images
from telegrad.transport.striped_tcp import StripedTcp
from telegrad.transport.stripes import CHECK, DESCRIBE, DONE, OK, REQUEST, STATUS, Stripe, shut
from telegrad.wire.frames import BufferLocation
from telegrad.wire.handshake import Incarnation

_DEVICES = Path("/sys/class/infiniband")
_BACKEND = "UCX"
# A description: the length of the agent's metadata, the metadata, and the regions.
_LENGTH = struct.Struct("<Q")
_REGION = struct.Struct("<QQ")  # the address and the length of a buffer
_MAX_DESCRIPTION = 1 << 24  # bytes
_POLL = (20e-6, 1e-3)  # seconds between two looks at a transfer: first, longest
_log = logging.getLogger(__name__)


def is_wanted(config: Config) -> bool:
    """Return whether a worker with this config uses NIXL."""
    if config.bulk_engine == "tcp" or not config.bulk_streams:
        return False
    forced = config.bulk_engine == "nixl"
    if forced and config.tls != "off":
        raise UsageError("NIXL does not encrypt: set TELEGRAD_TLS=off, or TELEGRAD_BULK_ENGINE=tcp")
    is_installed = importlib.util.find_spec("nixl") is not None
    if forced and not is_installed:
        raise UsageError("TELEGRAD_BULK_ENGINE=nixl needs: pip install telegrad[nixl]")
    return is_installed and config.tls == "off" and (forced or has_rdma())


def has_rdma() -> bool:
    """Return whether this host has an RDMA device."""
    return _DEVICES.is_dir() and any(_DEVICES.iterdir())


class _NixlPull:
    """The buffers of one frame that are being received. `_lock` guards its end."""

    def __init__(self, on_pulled: OnPulled) -> None:
        self._on_pulled: OnPulled | None = on_pulled
        self._fallback: Pull | None = None
        self._lock = new_lock()

    @property
    def has_ended(self) -> bool:
        return self._on_pulled is None

    def end(self, error: BaseException | None) -> bool:
        """End, if it has not ended. Return whether it has ended now."""
        with self._lock:
            on_pulled, self._on_pulled = self._on_pulled, None
        if on_pulled is not None:
            on_pulled(error)
        return on_pulled is not None

    def fall_back(self, start: Callable[[OnPulled], Pull]) -> None:
        """Let another engine pull the buffers."""
        fallback = start(self.end)
        with self._lock:
            self._fallback = fallback

    def cancel(self, error: BaseException) -> None:
        """End with this error, if it has not ended."""
        with self._lock:
            fallback = self._fallback
        if fallback is not None:
            fallback.cancel(error)
        self.end(error)


class NixlEngine(BulkEngine):
    """Read registered buffers from the memory of their sender."""

    def __init__(
        self,
        name: str,
        stripes: StripedTcp,
        connect: Callable[[BulkPeer], Stripe],
        start_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        """`name` is unique among all workers. `stripes` serves requests, and pulls what fails."""
        # imported here: it is an extra, and slow to import
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

        self._agent: Any = nixl_agent(name, nixl_agent_config(backends=[_BACKEND]))
        self._stripes = stripes
        self._connect = connect
        self._start_thread = start_thread
        self._described: dict[int, tuple[Any, bytes]] = {}
        self._kept: dict[Incarnation, list[Sequence[memoryview]]] = {}
        self._idle: dict[Incarnation, list[Stripe]] = {}
        self._closed = False
        self._lock = new_lock()
        self._pulled = AtomicCounter()  # frames that NIXL has transferred
        stripes.serve_descriptions(self._describe)

    def __repr__(self) -> str:
        return f"<NixlEngine {self.pulled} pulls, {len(self._described)} registrations>"

    @property
    def pulled(self) -> int:
        """How many frames NIXL has transferred."""
        return self._pulled.value

    # The sender

    def register(self, peer: BulkPeer, buffers: Sequence[memoryview]) -> Registration:
        return self._stripes.register(peer, buffers)

    def withdraw(self, registration: Registration) -> None:
        self._stripes.withdraw(registration)
        with self._lock:
            known = self._described.pop(registration.registration_id, None)
            if known is None:
                return
            self._agent.deregister_memory(known[0])
            if registration.withdrawn:
                # Transports without RDMA read in this process, perhaps after this.
                kept = self._kept.setdefault(registration.peer.incarnation, [])
                kept.append(registration.buffers)

    def check_reachable(self, registration: Registration) -> None:
        self._stripes.check_reachable(registration)

    def _describe(self, registration: Registration) -> bytes:
        """Return what a peer needs to read the buffers of a registration."""
        with self._lock:
            known = self._described.get(registration.registration_id)
            if known is None:
                fill_images(registration.buffers)
                regions = [_region(buffer) for buffer in registration.buffers]
                handle = self._agent.register_memory(
                    [(*region, "") for region in regions], mem_type="DRAM"
                )
                metadata = self._agent.get_partial_agent_metadata(handle, True, [_BACKEND])
                descriptors = b"".join(_REGION.pack(*region[:2]) for region in regions)
                known = handle, _LENGTH.pack(len(metadata)) + metadata + descriptors
                self._described[registration.registration_id] = known
            return known[1]

    # The receiver

    def pull(
        self, peer: BulkPeer, bulk: Sequence[tuple[BufferLocation, memoryview]], on_pulled: OnPulled
    ) -> Pull:
        pull = _NixlPull(on_pulled)
        try:
            self._start_thread(lambda: self._run(pull, peer, bulk))
        except RuntimeError as error:  # the system refuses a thread
            pull.end(error)
        return pull

    def _run(
        self, pull: _NixlPull, peer: BulkPeer, bulk: Sequence[tuple[BufferLocation, memoryview]]
    ) -> None:
        """Pull the buffers of one frame. This runs on a thread of its own."""
        registration_id = bulk[0][0].offset
        stripe: Stripe | None = None
        try:
            stripe = self._take_stripe(peer)
            description = self._ask_description(stripe, registration_id)
            self._read(pull, description, [memory for _, memory in bulk])
            if not _ask(stripe, CHECK, registration_id):
                pull.end(SerializationError("its sender gave up sending it"))
            elif pull.end(None):
                self._pulled.increment()
            _ask(stripe, DONE, registration_id)
            self._put_stripe(peer, stripe)
        except Exception as error:  # NIXL's errors have no common class
            _log.debug("NIXL could not pull from %r: %r", peer.name, error)
            if stripe is not None:
                stripe.close()
            if not pull.has_ended:
                pull.fall_back(lambda on_pulled: self._stripes.pull(peer, bulk, on_pulled))

    def _ask_description(self, stripe: Stripe, registration_id: int) -> bytes:
        if not _ask(stripe, DESCRIBE, registration_id):
            raise ProtocolError("the sender has no description")
        about = _request(DESCRIBE, registration_id)
        (length,) = STATUS.unpack(_receive(stripe, STATUS.size, about))
        if length > _MAX_DESCRIPTION:
            raise ProtocolError(f"a description of {length} bytes")
        return _receive(stripe, length, about)

    def _read(self, pull: _NixlPull, description: bytes, memory: Sequence[memoryview]) -> None:
        """Let NIXL copy the described buffers into `memory`."""
        (size,) = _LENGTH.unpack_from(description)
        start = _LENGTH.size
        # not by NIXL's `deserialize_descs`, which unpickles
        remote_regions = [(*each, 0) for each in _REGION.iter_unpack(description[start + size :])]
        regions = [_region(each) for each in memory]
        with self._lock:
            agent = self._agent
            remote = agent.add_remote_agent(description[start : start + size])
            handle = agent.register_memory([(*each, "") for each in regions], mem_type="DRAM")
            try:
                local = agent.get_xfer_descs(regions, mem_type="DRAM")
                there = agent.get_xfer_descs(remote_regions, mem_type="DRAM")
                transfer = agent.initialize_xfer("READ", local, there, remote.decode(), b"")
                state = agent.transfer(transfer)
            except BaseException:
                agent.deregister_memory(handle)
                raise
        try:
            self._wait(pull, transfer, state)
        finally:
            with self._lock:
                agent.release_xfer_handle(transfer)  # aborts it if it has not ended
                agent.deregister_memory(handle)

    def _wait(self, pull: _NixlPull, transfer: Any, state: str) -> None:
        pause = _POLL[0]
        while state == "PROC":
            if pull.has_ended or self._closed:
                raise ConnectionAbortedError("the pull was cancelled")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL[1])
            with self._lock:
                state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise ConnectionError(f"NIXL reports {state}")

    def done(self, peer: BulkPeer, registration_id: int) -> None:
        self._stripes.done(peer, registration_id)

    # Stripes for requests

    def _take_stripe(self, peer: BulkPeer) -> Stripe:
        with self._lock:
            idle = self._idle.get(peer.incarnation)
            if idle:
                return idle.pop()
        stripe = self._connect(peer)
        stripe.prepare()
        return stripe

    def _put_stripe(self, peer: BulkPeer, stripe: Stripe) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(peer.incarnation, []).append(stripe)
                return
        stripe.close()

    # Closing

    def forget_peer(self, incarnation: Incarnation) -> None:
        with self._lock:
            idle = self._idle.pop(incarnation, [])
            self._kept.pop(incarnation, None)
        for stripe in idle:
            stripe.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [stripe for each in self._idle.values() for stripe in each]
            self._idle.clear()
            self._described.clear()
            self._kept.clear()
            self._agent = None  # what is under way fails, and the agent ends
        shut(idle)
        for stripe in idle:
            stripe.close()


def _region(memory: memoryview) -> tuple[int, int, int]:
    """Return the address, the length and the device of host memory, as NIXL wants them."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address, memory.nbytes, 0


def _request(operation: int, registration_id: int) -> bytes:
    return REQUEST.pack(operation, 0, registration_id, 0, 0)


def _receive(stripe: Stripe, size: int, about: bytes) -> bytes:
    memory = bytearray(size)
    stripe.receive(memoryview(memory), about)
    return bytes(memory)


def _ask(stripe: Stripe, operation: int, registration_id: int) -> bool:
    """Send a request about a registration. Return whether it was accepted."""
    request = _request(operation, registration_id)
    stripe.send(request)
    accepted: bool = STATUS.unpack(_receive(stripe, STATUS.size, request))[0] == OK
    return accepted

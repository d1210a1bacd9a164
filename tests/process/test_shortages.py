"""A shortage of memory is an error of the call that met it, and the worker goes on; so does one
that was forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from telegrad.errors import SerializationError, TelegradError
from telegrad.refs import remote
from tests.process.fleet import Fleet
from tests.process.test_soak import join, settle, this_agent
from tests.refs.objects import Thing

pytestmark = pytest.mark.process

LARGE = 600_000_000  # bytes; more than `limit_memory` leaves
MEDIUM = 4_000_000  # bytes; through shared memory, and within the limit
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
FORKED = "UsageError: this process was forked from the one of agent 'w1' and cannot use it"


def limit_memory(spare: int | None = 300_000_000) -> None:
    """Let this process map `spare` bytes more than it has, or (None) as much as it wants."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (resource.RLIM_INFINITY if spare is None else mapped + spare, hard)
    )


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


def ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def failure_of_sending(to: str, nbytes: int, asynchronous: bool) -> str:
    """Send a tensor to a worker; the type of the error, or the sum of the tensor as it arrived."""
    agent, tensor = this_agent(), ones(nbytes)
    try:
        if asynchronous:
            return str(agent.submit(to, total, tensor).wait())
        return str(agent.call(to, total, tensor))
    except SerializationError as error:
        return type(error).__name__


def failure_of_receiving(to: str, nbytes: int, asynchronous: bool) -> str:
    agent = this_agent()
    try:
        if asynchronous:
            return str(int(agent.submit(to, ones, nbytes).wait().sum()))
        return str(int(agent.call(to, ones, nbytes).sum()))
    except SerializationError as error:
        return type(error).__name__
    except RuntimeError as error:
        return str(error)


def serves(to: str) -> bool:
    """Is a worker there for calls of every kind?"""
    agent = this_agent()
    return (
        agent.call(to, abs, -3) == 3
        and agent.submit(to, abs, -3).wait() == 3
        and agent.call(to, total, ones(MEDIUM)) == MEDIUM
        and agent.submit(to, total, ones(MEDIUM)).wait() == MEDIUM
        and remote(to, Thing, (4,), agent=agent).rpc_async().get().wait() == 4
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(2, join, str(tmp_path / "store")) as fleet:
        assert fleet[0].do(serves, "w1")
        assert fleet[1].do(serves, "w0")
        yield fleet


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_message_that_does_not_fit_the_address_space_fails_alone(
    fleet: Fleet, asynchronous: bool
) -> None:
    fleet[1].do(limit_memory)
    for _ in range(2):
        assert fleet[0].do(failure_of_sending, "w1", LARGE, asynchronous) == "SerializationError"
        assert fleet[1].do(failure_of_receiving, "w0", LARGE, asynchronous) == "SerializationError"
        # of the function itself
        assert "allocate" in fleet[0].do(failure_of_receiving, "w1", LARGE, asynchronous)
        assert fleet[0].do(serves, "w1")
        assert fleet[1].do(serves, "w0")
    fleet[1].do(limit_memory, None)
    assert fleet[0].do(failure_of_sending, "w1", LARGE, asynchronous) == str(LARGE)
    assert fleet[1].do(failure_of_receiving, "w0", LARGE, asynchronous) == str(LARGE)
    assert [worker.do(settle) for worker in fleet.workers] == [{}, {}]


def outcomes(to: str, rounds: int) -> list[str]:
    """Make calls of every kind; the types of the errors.

    A call that ends with neither a result nor an error hangs.
    """
    agent, errors = this_agent(), []
    kinds = [
        lambda: agent.call(to, abs, -3) == 3,
        lambda: (
            [each.wait() for each in [agent.submit(to, abs, -3) for _ in range(20)]] == [3] * 20
        ),
        lambda: agent.call(to, total, ones(MEDIUM)) == MEDIUM,
        lambda: agent.submit(to, total, ones(MEDIUM)).wait() == MEDIUM,
        lambda: int(agent.call(to, ones, MEDIUM).sum()) == MEDIUM,
        lambda: int(agent.submit(to, ones, MEDIUM).wait().sum()) == MEDIUM,
        lambda: remote(to, Thing, (4,), agent=agent).rpc_async().get().wait() == 4,
        lambda: remote(to, Thing, (4,), agent=agent).rpc_sync().get() == 4,
        lambda: agent.call(to, nest, agent.name, 3) == 3,
    ]
    agent._runtime.timeout, before = 1.0, agent._runtime.timeout
    for _ in range(rounds):
        for kind in kinds:
            try:
                assert kind()
            except (TelegradError, MemoryError, OSError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    agent._runtime.timeout = before
    return errors


def nest(to: str, depth: int) -> int:
    return 0 if depth == 0 else 1 + int(this_agent().call(to, nest, this_agent().name, depth - 1))


@pytest.mark.parametrize("spare", [0, 10_000_000, 30_000_000])
def test_a_worker_without_memory_goes_on_when_there_is_some(fleet: Fleet, spare: int) -> None:
    """Threads, shared memory and tensors all need address space."""
    fleet[1].do(limit_memory, spare)
    errors = fleet[0].do(outcomes, "w1", 3) + fleet[1].do(outcomes, "w0", 3)
    assert errors or spare
    assert not [error for error in errors if "was lost" in error]
    fleet[1].do(limit_memory, None)
    assert fleet[0].do(serves, "w1")
    assert fleet[1].do(serves, "w0")
    assert [worker.do(settle) for worker in fleet.workers] == [{}, {}]


# /dev/shm


def join_with_tiny_shm(rank: int, size: int, path: str) -> None:
    """Join with a /dev/shm of one megabyte, which is full, that no other process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
    ):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") != 0:
        raise OSError(ctypes.get_errno(), "no tmpfs")
    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        filler.write(bytes(1 << 20))
    join(rank, size, path)


def free_of_shm() -> int:
    return os.statvfs("/dev/shm").f_bavail


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_shm_is_no_shortage(tmp_path: Path) -> None:
    """Shared memory of Telegrad is made of memfds, which no mount limits."""
    try:
        fleet = Fleet(2, join_with_tiny_shm, str(tmp_path / "store")).__enter__()
    except AssertionError as error:
        if "no mount namespace" in str(error) or "no tmpfs" in str(error):
            pytest.skip("not permitted to mount here")
        raise
    with contextlib.closing(fleet):
        assert [worker.do(free_of_shm) for worker in fleet.workers] == [0, 0]
        assert fleet[0].do(serves, "w1")
        assert fleet[1].do(serves, "w0")
        assert fleet[0].do(failure_of_receiving, "w1", LARGE, False) == str(LARGE)
        assert [worker.do(settle) for worker in fleet.workers] == [{}, {}]


# Forks


def fork_inside_call(large: torch.Tensor) -> tuple[str, int]:
    """Fork; what the child met when it used the agent, and the sum of the argument after the child
    has ended.
    """
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks with threads are what is tested
        child = os.fork()
    if child == 0:
        try:
            text = f"no error: {this_agent().call('w0', abs, -1)}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writable, text.encode())
        del large  # its block of shared memory still belongs to the parent
        gc.collect()
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text, int(large.sum())


def fork_and_return() -> int:
    """Fork, and let the child return from the call as well: only the parent may answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.waitpid(child, 0)
    return child


def call_forks(to: str, asynchronous: bool) -> list[str]:
    agent, texts = this_agent(), []
    for _ in range(3):
        for function, args in ((fork_inside_call, (ones(MEDIUM),)), (fork_and_return, ())):
            start = agent._runtime.start(to, function, args, None, 20.0) if asynchronous else None
            result = (
                start.wait()
                if start is not None
                else agent._runtime.invoke(to, function, args, None, 20.0)
            )
            if function is fork_inside_call:
                assert result[1] == MEDIUM
                texts.append(result[0])
            else:
                assert result > 0  # the child would have answered 0
        assert serves(to)
    return texts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_child_forked_inside_a_call_does_not_disturb_its_parent(
    fleet: Fleet, asynchronous: bool
) -> None:
    texts = fleet[0].do(call_forks, "w1", asynchronous)
    assert {text.partition(";")[0] for text in texts} == {FORKED}
    assert fleet[1].do(serves, "w0")
    assert [worker.do(settle) for worker in fleet.workers] == [{}, {}]

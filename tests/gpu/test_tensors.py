"""CUDA tensors of every kind arrive with the values that they had when they were sent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import telegrad.rpc as rpc
from telegrad.errors import PeerLost
from telegrad.testing import LocalCluster
from tests.gpu.group import join, join_without_gpu
from tests.local.gates import PATIENCE, until
from tests.process.fleet import Fleet

# torch says that such tensors are new or unchecked
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

KINDS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(3.5, device="cuda"),
    "flat": lambda: torch.randn(1000, device="cuda"),
    "bytes": lambda: torch.arange(256, device="cuda").to(torch.uint8),
    "flags": lambda: torch.randn(77, device="cuda") > 0,
    "half": lambda: torch.randn(64, 64, device="cuda", dtype=torch.bfloat16),
    "complex": lambda: torch.randn(9, device="cuda", dtype=torch.complex64),
    "conjugate": lambda: torch.randn(9, device="cuda", dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 3, device="cuda"),
    "transposed": lambda: torch.randn(4, 5, device="cuda").t(),
    "with gaps": lambda: torch.randn(8, 8, device="cuda")[:, ::2],
    "small part": lambda: torch.randn(8, 800, device="cuda")[:, ::200],
    "expanded": lambda: torch.randn(3, 1, device="cuda").expand(3, 7),
    "channels last": lambda: torch.randn(2, 3, 4, 5, device="cuda").to(
        memory_format=torch.channels_last
    ),
    "sparse": lambda: torch.randn(6, 6, device="cuda").relu().to_sparse(),
    "compressed": lambda: torch.randn(6, 6, device="cuda").relu().to_sparse_csr(),
    "large": lambda: torch.randn(5_000_000, device="cuda"),
    "large half": lambda: torch.randn(1500, 2001, device="cuda").bfloat16(),
    "large flags": lambda: torch.randn(2_000_003, device="cuda") > 0,
    "large transposed": lambda: torch.randn(1100, 1201, device="cuda").t(),
    "large with a gradient": lambda: torch.randn(1_000_000, device="cuda", requires_grad=True),
    "needs a gradient": lambda: torch.randn(4, device="cuda", requires_grad=True),
}


def echo(value: Any) -> Any:
    return value


def dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()


def check_same(sent: Tensor, back: object) -> None:
    assert isinstance(back, Tensor)
    assert back.device == sent.device
    assert back.dtype == sent.dtype
    assert back.layout == sent.layout
    assert back.requires_grad == sent.requires_grad
    assert torch.equal(dense(back), dense(sent))


def send_kinds() -> None:
    torch.manual_seed(0)
    for make in KINDS.values():
        tensor = make()
        check_same(tensor, rpc.rpc_sync("w1", echo, args=(tensor,)))
        check_same(tensor, rpc.rpc_async("w1", echo, args=({"deep": [tensor]},)).wait()["deep"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_travels_between_workers_of_one_process(kind: str) -> None:
    torch.manual_seed(0)
    for transport in ("memory", "unix", "tcp"):
        with LocalCluster(2, transports=(transport,)) as cluster:
            tensor = KINDS[kind]()
            check_same(tensor, cluster["w0"].call("w1", echo, tensor))


def test_every_kind_travels_between_processes(pair: Fleet) -> None:
    pair[0].do(send_kinds)


def send_many_at_once() -> None:
    tensors = [torch.full((number + 1,), float(number), device="cuda") for number in range(300)]
    back = rpc.rpc_sync("w1", echo, args=(tensors,))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, back, strict=True))
    futures = [rpc.rpc_async("w1", echo, args=(tensor,)) for tensor in tensors]
    assert all(
        torch.equal(mine, future.wait()) for mine, future in zip(tensors, futures, strict=True)
    )


def test_many_tensors_in_one_message_and_many_messages_at_once(pair: Fleet) -> None:
    pair[0].do(send_many_at_once)


# Later writes do not change what was sent


def overwrite_after_sending() -> None:
    for number in range(10):
        tensor = torch.full((5_000_000,), float(number), device="cuda")
        future = rpc.rpc_async("w1", echo, args=(tensor,))
        tensor.fill_(-1)
        assert torch.all(future.wait() == number).item()


def test_writing_to_a_tensor_that_was_sent_changes_nothing_there(pair: Fleet) -> None:
    pair[0].do(overwrite_after_sending)


class Weights:
    value: Tensor | None = None


def weights() -> Tensor:
    if Weights.value is None:
        Weights.value = torch.zeros(5_000_000, device="cuda")
    return Weights.value


def change_weights(to: float) -> None:
    weights().fill_(to)


def read_while_they_change() -> None:
    for number in range(20):
        rpc.rpc_sync("w1", change_weights, args=(float(number),))
        seen = rpc.rpc_async("w1", weights)
        rpc.rpc_sync("w1", echo, args=(None,))
        later = rpc.rpc_async("w1", change_weights, args=(-1.0,))
        values = set(seen.wait().unique().tolist())
        assert values in ({float(number)}, {-1.0})  # one or the other, never a mixture
        later.wait()


def test_a_result_is_what_it_was_when_it_was_returned(pair: Fleet) -> None:
    pair[0].do(read_while_they_change)


# Exclusive tensors are leased without a snapshot


LARGE = 5_000_000


def sleep_on_the_gpu() -> None:
    torch.cuda._sleep(200_000_000)  # 0.1 s


def store(tensor: Tensor) -> None:
    Weights.value = tensor


def overwrite_when_the_call_is_over() -> None:
    for number in range(3):
        tensor = torch.full((LARGE,), float(number), device="cuda")
        rpc.rpc_sync("w1", sleep_on_the_gpu)
        rpc.rpc_sync("w1", store, args=(tensor,))
        tensor.fill_(-1)
        torch.cuda.synchronize()
        assert outstanding()[0] == 0
        assert torch.all(rpc.rpc_sync("w1", weights) == number).item()


def test_the_caller_may_write_to_an_argument_when_the_call_is_over(pair: Fleet) -> None:
    pair[0].do(overwrite_when_the_call_is_over)


def send_what_is_not_ready() -> None:
    for number in range(3):
        torch.cuda._sleep(100_000_000)
        tensor = torch.full((LARGE,), float(number), device="cuda")
        rpc.rpc_sync("w1", store, args=(tensor,))
        assert torch.all(rpc.rpc_sync("w1", weights) == number).item()


def test_an_argument_that_is_not_ready_is_waited_for(pair: Fleet) -> None:
    pair[0].do(send_what_is_not_ready)


def fresh(value: float, late: bool) -> tuple[Tensor, str]:
    if late:
        sleep_on_the_gpu()
    return torch.full((LARGE,), value, device="cuda"), "words"


def receive_late() -> None:
    for late in (False, True):
        results = []
        for number in range(5):
            # The copy runs after the next call, which may allocate the same memory.
            torch.cuda._sleep(100_000_000)
            results.append(rpc.rpc_sync("w1", fresh, args=(float(number), late))[0])
        assert all(torch.all(result == number).item() for number, result in enumerate(results))


def test_a_result_is_kept_until_it_is_copied(pair: Fleet) -> None:
    pair[0].do(receive_late)
    pair[0].do(wait_until_nothing_is_outstanding)
    pair[1].do(wait_until_nothing_is_outstanding)


def read_what_changes_next() -> None:
    for number in range(5):
        rpc.rpc_sync("w1", change_weights, args=(float(number),))
        torch.cuda._sleep(100_000_000)
        seen = rpc.rpc_sync("w1", weights)
        rpc.rpc_sync("w1", change_weights, args=(-1.0,))
        assert torch.all(seen == number).item()


def test_a_result_that_the_callee_keeps_may_change_there(pair: Fleet) -> None:
    pair[0].do(read_what_changes_next)


released = threading.Event()


def hold(tensor: Tensor) -> None:
    assert released.wait(PATIENCE)


def release() -> None:
    released.set()


def give_up() -> str:
    tensor = torch.ones(LARGE, device="cuda")
    try:
        rpc.rpc_sync("w1", hold, args=(tensor,), timeout=0.2)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_leases_of_a_call_that_timed_out_end(pair: Fleet) -> None:
    pair[0].do(rpc_once)
    assert "timeout" in pair[0].do(give_up)
    pair[1].do(release)
    pair[0].do(wait_until_nothing_is_outstanding)
    pair[1].do(wait_until_nothing_is_outstanding)


def rpc_once() -> None:
    rpc.rpc_sync("w1", echo, args=(torch.ones(LARGE, device="cuda"),))


def mapped() -> int:
    return int(rpc._get_current_rpc_agent().statistics()["cuda_allocations_mapped"])


def wait_until_nothing_is_mapped() -> None:
    until(lambda: not mapped())


def test_memory_of_others_is_unmapped_when_it_is_not_used(tmp_path: Path) -> None:
    with Fleet(2, join, str(tmp_path / "store"), {}) as pair:
        pair[0].do(rpc_once)
        assert pair[1].do(mapped) > 0
        pair[1].do(wait_until_nothing_is_mapped)
        pair[0].do(wait_until_nothing_is_mapped)
        pair[0].do(send_what_is_not_ready)


def send_what_cannot_be_mapped() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    tensor = torch.full((30_000_000,), 4.0, device="cuda")
    assert torch.all(rpc.rpc_sync("w1", echo, args=(tensor,)) == 4).item()


def test_memory_that_cannot_be_mapped_goes_through_the_host(pair: Fleet) -> None:
    pair[0].do(rpc_once)
    pair[0].do(send_what_cannot_be_mapped)


def send_few_bytes() -> None:
    for size in (1, 2, 3, 5, 511, 512, 513, 4095, 4096, 65535, 65536, 65537):
        tensor = torch.randint(256, (size,), device="cuda").to(torch.uint8)
        torch.cuda.synchronize()
        back = rpc.rpc_sync("w1", echo, args=(tensor,))
        assert torch.equal(tensor, back)
        assert back.device == tensor.device


def test_few_bytes_of_any_number(pair: Fleet) -> None:
    pair[0].do(send_few_bytes)


def send_few_bytes_while_the_gpu_is_busy() -> None:
    tensors = [torch.full((9,), float(number), device="cuda") for number in range(200)]
    torch.cuda.synchronize()
    rpc.rpc_sync("w1", sleep_on_the_gpu)
    futures = [rpc.rpc_async("w1", torch.add, args=(tensor, 1)) for tensor in tensors]
    assert all(
        torch.all(future.wait() == number + 1).item() for number, future in enumerate(futures)
    )


def test_more_small_copies_than_pinned_buffers(pair: Fleet) -> None:
    pair[0].do(send_few_bytes_while_the_gpu_is_busy)


def receive_and_write() -> None:
    first = rpc.rpc_sync("w1", weights)
    first.fill_(7)
    assert torch.all(rpc.rpc_sync("w1", weights) == 0).item()


def test_writing_to_a_tensor_that_arrived_changes_nothing_at_its_sender(pair: Fleet) -> None:
    pair[0].do(receive_and_write)


# Streams


def use_streams() -> None:
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(5):
        with torch.cuda.stream(mine):
            torch.cuda._sleep(50_000_000)
            tensor = torch.full((1000,), float(number), device="cuda")
            future = rpc.rpc_async("w1", increase_late, args=(tensor,))
        with torch.cuda.stream(other):
            assert torch.all(future.wait() == number + 1).item()
        with torch.cuda.stream(mine):
            assert torch.all(rpc.rpc_sync("w1", increase_late, args=(tensor,)) == number + 1).item()


def receive_few_bytes_on_another_stream() -> None:
    side = torch.cuda.Stream()
    for number in range(10):
        tensor = torch.full((5,), float(number), device="cuda")
        torch.cuda.synchronize()
        future = rpc.rpc_async("w1", torch.add, args=(tensor, 1))
        torch.cuda._sleep(100_000_000)  # on the stream of the thread that reads the answer
        with torch.cuda.stream(side):
            assert torch.all(future.wait() == number + 1).item()


def test_few_bytes_are_ready_on_the_stream_of_who_waits(pair: Fleet) -> None:
    pair[0].do(receive_few_bytes_on_another_stream)


def increase_late(tensor: Tensor) -> Tensor:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    tensor.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        result = tensor + 1
    here.wait_stream(side)
    result.record_stream(here)
    return result


def test_work_on_any_stream_is_waited_for(pair: Fleet) -> None:
    pair[0].do(use_streams)


# Lifetime


def outstanding() -> tuple[int, int]:
    statistics = rpc._get_current_rpc_agent().statistics()
    return statistics["cuda_tensors_lent"], statistics["cuda_copies_under_way"]


def wait_until_nothing_is_outstanding() -> None:
    until(lambda: outstanding() == (0, 0))


def send_and_drop() -> None:
    for size in (1, 1000, 3_000_000):
        for _ in range(50):
            rpc.rpc_sync("w1", echo, args=(torch.ones(size, device="cuda"),))
            # Otherwise the program queues more and more results ahead of the GPU.
            torch.cuda.synchronize()


def reserved() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def test_leased_memory_is_freed(pair: Fleet) -> None:
    pair[0].do(send_and_drop)
    first = pair[0].do(reserved), pair[1].do(reserved)
    for _ in range(3):
        pair[0].do(send_and_drop)
    pair[0].do(wait_until_nothing_is_outstanding)
    pair[1].do(wait_until_nothing_is_outstanding)
    again = pair[0].do(reserved), pair[1].do(reserved)
    assert all(now <= 2 * before for now, before in zip(again, first, strict=True))


class Kept:
    value: Tensor | None = None


def keep(size: int) -> None:
    Kept.value = rpc.rpc_sync("w1", torch.full, args=((size,), 4.0), kwargs={"device": "cuda"})


def is_intact() -> bool:
    assert Kept.value is not None
    churn = [torch.full((1_000_000,), 9.0, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    return bool(torch.all(Kept.value == 4.0).item()) and len(churn) == 20


def test_what_arrived_outlives_its_sender(pair: Fleet) -> None:
    pair[0].do(keep, 3_000_000)
    pair[1].kill()
    assert pair[0].do(is_intact)
    pair[0].do(wait_until_nothing_is_outstanding)


def send_to_the_dying() -> str:
    future = rpc.rpc_async("w1", die_with, args=(torch.ones(3_000_000, device="cuda"),))
    try:
        future.wait()
    except PeerLost as error:
        return type(error).__name__
    return "no error"


def die_with(tensor: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_leases_of_a_receiver_that_dies_end(pair: Fleet) -> None:
    assert pair[0].do(send_to_the_dying) == "PeerLost"
    pair[0].do(wait_until_nothing_is_outstanding)


def send_without_room() -> bool:
    tensor = torch.full((50_000_000,), 3.0, device="cuda")
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    return bool(rpc.rpc_sync("w1", total_of, args=(tensor,)) == 150_000_000)


def total_of(tensor: Tensor) -> float:
    return float(tensor.double().sum().item())


def test_a_tensor_for_whose_copy_there_is_no_room_goes_through_the_host(pair: Fleet) -> None:
    assert pair[0].do(send_without_room)


def limit_memory() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)


def send_to_one_without_room() -> str:
    tensor = torch.full((50_000_000,), 3.0, device="cuda")
    try:
        rpc.rpc_sync("w1", total_of, args=(tensor,))
    except Exception as error:
        return str(error)
    return "no error"


def test_a_tensor_for_which_the_receiver_has_no_room_fails_alone(pair: Fleet) -> None:
    pair[0].do(rpc_once)
    pair[1].do(limit_memory)
    assert "out of memory" in pair[0].do(send_to_one_without_room)
    pair[0].do(rpc_once)
    assert pair[0].do(outstanding)[0] == 0


def exchange_at_once() -> None:
    """Memory of the device is received into, freed and used again, by several threads."""
    failures = []

    def exchange(number: int) -> None:
        for count in range(20):
            sent = torch.full((LARGE // 2,), float(100 * number + count), device="cuda")
            back = rpc.rpc_sync("w1", torch.add, args=(sent, 1.0))
            if not torch.all(back == 100 * number + count + 1).item():
                failures.append((number, count))

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_large_tensors_of_several_threads(pair: Fleet) -> None:
    pair[0].do(exchange_at_once)


# Device maps


def describe(tensor: Tensor) -> tuple[str, Tensor]:
    return str(tensor.device), tensor + 1


def ask_where(device: str) -> tuple[str, str]:
    there, back = rpc.rpc_sync("w1", describe, args=(torch.ones(3, device=device),))
    assert torch.all(back == 2).item()
    return there, str(back.device)


@pytest.mark.parametrize(
    ("devices", "source", "there", "back"),
    [
        ({}, "cuda:0", "cuda:0", "cuda:0"),
        ({0: 0}, "cuda:0", "cuda:0", "cuda:0"),
        ({0: "cpu"}, "cuda:0", "cpu", "cuda:0"),
        ({"cpu": 0}, "cpu", "cuda:0", "cpu"),
        ({"cpu": 0, 0: "cpu"}, "cpu", "cuda:0", "cpu"),
    ],
)
def test_maps_say_where_tensors_arrive(
    tmp_path: Path, devices: dict[object, object], source: str, there: str, back: str
) -> None:
    with Fleet(2, join, str(tmp_path / "store"), {"maps": {0: {"w1": devices}}}) as fleet:
        assert fleet[0].do(ask_where, source) == (there, back)


def ask_worker_without_gpu() -> str:
    try:
        return str(ask_where("cuda:0"))
    except RuntimeError as error:
        return str(error)


def test_a_worker_without_a_gpu_is_named_and_what_to_do(tmp_path: Path) -> None:
    with Fleet(2, join_without_gpu, str(tmp_path / "store"), {}) as fleet:
        answer = fleet[0].do(ask_worker_without_gpu)
    assert "worker 'w1' has 0 CUDA devices" in answer
    assert "set_device_map" in answer


def test_a_worker_without_a_gpu_gets_cpu_tensors_if_allowed(tmp_path: Path) -> None:
    settings = {"config": {"unmapped_devices": "cpu"}}
    with Fleet(2, join_without_gpu, str(tmp_path / "store"), settings) as fleet:
        assert fleet[0].do(ask_worker_without_gpu) == "('cpu', 'cpu')"


def test_unmapped_devices_can_be_refused_as_torch_does(tmp_path: Path) -> None:
    with Fleet(
        2, join, str(tmp_path / "store"), {"config": {"unmapped_devices": "refuse"}}
    ) as fleet:
        answer = fleet[0].do(ask_worker_without_gpu)
    assert "only supports CPU tensors by default" in answer

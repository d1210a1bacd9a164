"""Two workers on one machine call functions on each other.

Usage:

    python examples/two_workers.py

Each worker is a process. worker0 makes the calls below; worker1 serves them, and both leave when
worker0 has finished.
"""

import os

import torch

import telegrad
import telegrad.rpc as rpc


class EmptyBatch(ValueError):
    """An exception class with an attribute, which remote calls preserve."""

    def __init__(self, step: int) -> None:
        super().__init__(f"nothing in the batch of step {step}")
        self.step = step

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return EmptyBatch, (self.step,)


def norm(batch: torch.Tensor, step: int) -> float:
    if batch.numel() == 0:
        raise EmptyBatch(step)
    return batch.norm().item()


def call_worker1() -> None:
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    print(f"one call           torch.add on worker1 returned {total}")

    futures = [
        rpc.rpc_async("worker1", norm, args=(torch.full((4,), float(i)), i)) for i in range(5)
    ]
    print(f"five at once       their norms are {[future.wait() for future in futures]}")

    scale = 10
    scaled = rpc.rpc_sync("worker1", lambda x: x * scale, args=(torch.arange(3),))
    print(f"a lambda           was sent with the variable it closes over: {scaled}")

    try:
        rpc.rpc_sync("worker1", norm, args=(torch.empty(0), 7))
    except EmptyBatch as error:
        print(f"an error           arrived as {error!r}, step={error.step}, and its cause is")
        print("\n".join(f"    {line}" for line in str(error.__cause__).strip().splitlines()))

    pid = rpc.rpc_sync("worker1", os.getpid)
    print(f"still there        worker1 is process {pid}, worker0 is process {os.getpid()}")


def work() -> None:
    rpc.init_rpc()  # the launcher says which worker this is
    if rpc.get_worker_info().name == "worker0":
        call_worker1()
    rpc.shutdown()  # waits until all workers have called it


if __name__ == "__main__":
    telegrad.launch(work, 2)
    print("both workers left")

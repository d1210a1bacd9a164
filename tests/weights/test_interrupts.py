"""Ctrl-C at any point of a pull: no version is mixed, and no memory stays in use."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import telegrad.weights
from telegrad.weights import Publisher, Subscriber
from telegrad.weights.versions import VersionStore
from tests.conftest import Clusters
from tests.local.gates import until
from tests.weights.conftest import PATIENCE, values_of

FOLDER = str(Path(telegrad.weights.__file__).parent)


@cache
def after_calls(code: CodeType) -> set[int]:
    """Return the instructions that follow a call, where Python runs signal handlers."""
    found = pairwise(dis.get_instructions(code))
    return {
        after.offset
        for call, after in found
        if call.opname.startswith("CALL") and after.opname.startswith(("POP_TOP", "STORE"))
    }


class Interruption:
    """Raises `KeyboardInterrupt` at one place of `telegrad.weights`: in a function or after it."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and frame.f_lasti in after_calls(frame.f_code)):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def run(self, function: Callable[[], object]) -> bool:
        """Run a function. Return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def tickets(store: VersionStore) -> list[Any]:
    """Return the tickets of those that read a version."""
    return [each for each in list(store._tickets.values()) if not each.is_update]


@pytest.mark.parametrize("use", ["pull_into", "state_dict", "view"])
@pytest.mark.parametrize("sliced", [False, True])
def test_an_interrupted_reader_gives_everything_back(
    cluster: Clusters, transport: str, use: str, sliced: bool
) -> None:
    workers = cluster(2, transports=(transport,))
    weights = {f"t{number}": torch.zeros(10) for number in range(3)}
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    publisher.publish(0)
    copy = {name: torch.full((10,), -1.0) for name in weights}
    options: Any = {"weights": copy} if sliced else {}
    with Subscriber("policy", agent=workers["w1"], patience=0.5, **options) as subscriber:
        subscriber.pull_into(copy)

        def read() -> None:
            if use == "pull_into":
                subscriber.pull_into(copy)
            elif use == "state_dict":
                subscriber.state_dict()
            else:
                with subscriber.view():
                    pass

        own: Any = subscriber._receiver
        receivers = list(own._receivers.values()) if sliced else [own]
        stores = [each._store for each in receivers if each._store is not None]
        held = len(stores) if sliced else 0  # the newest version
        stores.append(publisher._store)
        at = 0
        while Interruption(at).run(read):
            at += 1
            for tensor in weights.values():
                tensor.fill_(at)
            publisher.publish(at)
            assert len(values_of(copy)) == 1
            subscriber.newer_than(at - 1).result(PATIENCE)
        assert at > 20
        subscriber.pull_into(copy)
        assert values_of(copy) == {float(at)}
        until(lambda: sum(len(tickets(store)) for store in stores) == held)
        assert not sliced or not own._complete.users

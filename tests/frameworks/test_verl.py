"""verl: its real registry and base class, without a GPU and without Ray's actors.

The steps are those of verl's `CheckpointEngineManager.update_weights`.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these packages, when they are imported
    pytest.importorskip(
        "verl.checkpoint_engine", reason="verl is not installed: make test-registries"
    )
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

    from telegrad.integrations.verl import TelegradCheckpointEngine

pytestmark = pytest.mark.filterwarnings("ignore")
BUCKET = 1 << 20


def new(**options: Any) -> TelegradCheckpointEngine:
    engine = CheckpointEngineRegistry.new("telegrad", bucket_size=BUCKET, **options)
    assert isinstance(engine, TelegradCheckpointEngine)
    return engine


def weights(step: int) -> Iterator[tuple[str, Tensor]]:
    yield "a.weight", torch.full((20, 30), step, dtype=torch.bfloat16)
    yield "b", torch.full((7,), float(step))


def connect(
    actors: list[TelegradCheckpointEngine], rollouts: list[TelegradCheckpointEngine]
) -> None:
    metadata = [engine.prepare() for engine in [*actors, *rollouts]]
    topology = TelegradCheckpointEngine.build_topology(len(actors), len(rollouts), metadata)
    for engines, arguments in zip((actors, rollouts), topology, strict=True):
        assert all(len(values) == len(engines) for values in arguments.values())
        for index, engine in enumerate(engines):
            engine.init_process_group(**{key: each[index] for key, each in arguments.items()})


async def received(engine: TelegradCheckpointEngine, step: int) -> dict[str, Tensor]:
    return {name: t.clone() async for name, t in engine.receive_weights(global_steps=step)}


async def update(
    actors: list[TelegradCheckpointEngine], rollouts: list[TelegradCheckpointEngine], step: int
) -> None:
    connect(actors, rollouts)
    sent = [engine.send_weights(weights(step), global_steps=step) for engine in actors]
    results = await asyncio.gather(*(received(each, step) for each in rollouts), *sent)
    for result in results[: len(rollouts)]:
        for name, tensor in weights(step):
            assert torch.equal(result[name], tensor)
    for engine in [*actors, *rollouts]:
        engine.finalize()


def test_the_methods_have_the_arguments_of_verl() -> None:
    for name in CheckpointEngine.__abstractmethods__:
        theirs = inspect.signature(getattr(CheckpointEngine, name)).parameters
        ours = inspect.signature(getattr(TelegradCheckpointEngine, name)).parameters
        if name != "init_process_group":  # it takes what build_topology returns
            assert list(ours) == list(theirs), name
    assert TelegradCheckpointEngine.wire_format == "named_tensors"


def test_weights_reach_all_rollouts_step_by_step() -> None:
    actors = [new(is_master=True), new()]
    rollouts = [new(), new()]
    try:
        for step in (3, 4, 2):  # verl's steps may go back, after a checkpoint was loaded
            asyncio.run(update(actors, rollouts, step))
        assert [each.version for each in (actors[0], *rollouts)] == [3, 3, 3]
        rollouts.pop().close()
        rollouts.append(new())  # verl adds and removes replicas
        asyncio.run(update(actors, rollouts, 9))
        actors[0].close()
        actors[0] = new(is_master=True)  # the trainer is restarted
        asyncio.run(update(actors, rollouts, 1))
        assert rollouts[0].version == 1
    finally:
        for engine in [*actors, *rollouts]:
            engine.close()


def test_a_rollout_does_not_wait_for_ever() -> None:
    actor, rollout = new(is_master=True), new(timeout=0.2)
    try:
        connect([actor], [rollout])
        with pytest.raises(errors.CallTimeout, match="version 1"):
            asyncio.run(received(rollout, 1))
        with pytest.raises(errors.UsageError, match="only rollout workers"):
            asyncio.run(received(actor, 1))
        with pytest.raises(errors.UsageError, match="first actor"):
            TelegradCheckpointEngine.build_topology(1, 1, [{}, {}])
    finally:
        rollout.close()
        actor.close()

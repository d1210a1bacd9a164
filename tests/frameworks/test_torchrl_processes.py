"""TorchRL: collectors and inference servers in processes that are killed."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
from torch import nn

from telegrad import WorkerGroup, errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these packages, when they are imported
    pytest.importorskip("torchrl", reason="TorchRL is not installed: make test-frameworks")
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector
    from torchrl.modules.inference_server import ProcessInferenceServer
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    from telegrad.integrations.torchrl import TelegradTransport, TelegradWeightSyncScheme
    from tests.frameworks.policies import PATIENCE, fill, make_policy, make_sender, observation

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Check nothing: multiprocessing keeps a process and a socket for tensors that it shares."""


def make_env() -> ContinuousActionVecMockEnv:
    return ContinuousActionVecMockEnv()


def test_a_collector_whose_worker_is_killed() -> None:
    env = make_env()
    inputs = env.observation_spec["observation"].shape[-1]
    policy = TensorDictModule(
        nn.Linear(inputs, env.action_spec.shape[-1]), in_keys=["observation"], out_keys=["action"]
    )
    scheme = TelegradWeightSyncScheme(timeout=PATIENCE)
    collector = MultiSyncCollector(
        [make_env] * 2,
        policy,
        frames_per_batch=20,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    try:
        batches = iter(collector)
        for version in range(3):
            batch = next(batches)
            assert list(scheme.versions().values()) == [version] * 2
            assert batch["next", "policy_version"].unique().tolist() == [version]
            torch.testing.assert_close(batch["action"], policy.module(batch["observation"]))
            fill(policy, version)
            collector.update_policy_weights_()  # returns when both workers have the version
        victim, survivor = collector.procs
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(PATIENCE)
        collector.update_policy_weights_()
        ((name, version),) = scheme.versions().items()
        assert version == 4
        assert str(survivor.pid) in name
    finally:
        for process in collector.procs:
            process.kill()
        for process in collector.procs:
            process.join(PATIENCE)
        scheme.shutdown()


def test_servers_in_processes_are_killed_and_come_back() -> None:
    policy = make_policy()
    fill(policy, 0)
    sender = make_sender(policy)
    servers, transports = [], []
    try:
        for name in ("server0", "server1"):
            transports.append(TelegradTransport(name, store=sender.store, timeout=PATIENCE))
            servers.append(
                ProcessInferenceServer(
                    policy_factory=make_policy,
                    transport=transports[-1],
                    weight_sync=TelegradWeightSyncScheme(store=sender.store),
                    startup_timeout=200.0,
                ).start()
            )
        clients = [transport.client() for transport in transports]

        def check(number: int, version: int) -> None:
            reply = clients[number](observation())
            assert reply["policy_version"] == version
            assert reply["action"].tolist() == [5.0 * version] * 2

        def send(version: int, receivers: int) -> None:
            fill(policy, version)
            sender.send()
            assert list(sender.versions().values()) == [version] * receivers

        check(0, 0)  # a server that replies has connected
        check(1, 0)
        send(1, 2)
        check(0, 1)
        check(1, 1)
        process = servers[0]._process
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        send(2, 1)
        check(1, 2)
        with pytest.raises(errors.PeerLost):
            check(0, 2)
        servers[0].start()
        agent = transports[0]._membership.agent()
        WorkerGroup(agent).match("server0").wait_for(1, PATIENCE)
        check(0, 2)  # it gets the newest version at once
        send(3, 2)
        check(0, 3)
        check(1, 3)
    finally:
        for server in servers:
            server.shutdown()
        for transport in transports:
            transport.close()
        sender.shutdown()

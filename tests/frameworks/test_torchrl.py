"""TorchRL: the weights of real collectors and inference servers come through Telegrad."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from telegrad import errors
from telegrad.testing import LocalCluster
from tests.test_docs import BLOCKS, Block

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these packages, when they are imported
    pytest.importorskip("torchrl", reason="TorchRL is not installed: make test-frameworks")
    from tensordict import TensorDict
    from torchrl.modules.inference_server import (
        InferenceServer,
        PolicyClientModule,
    )

    from telegrad.integrations.torchrl import TelegradTransport, TelegradWeightSyncScheme
    from tests.frameworks.policies import PATIENCE, fill, make_policy, make_sender, observation

pytestmark = pytest.mark.filterwarnings("ignore")
OF_TORCHRL = [block for block in BLOCKS if "telegrad.integrations.torchrl" in block.code]


def receive(scheme: TelegradWeightSyncScheme, policy: nn.Module) -> None:
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=0)
    scheme.connect(worker_idx=0)


@pytest.fixture
def workers() -> Iterator[LocalCluster]:
    with LocalCluster(3, fixed_size=False) as cluster:
        yield cluster


@pytest.mark.parametrize("block", OF_TORCHRL, ids=lambda block: f"{block.page}:{block.line}")
def test_blocks_of_the_pages(block: Block) -> None:
    if block.runs:
        exec(compile(block.code, block.page, "exec"), {"__name__": "page"})


def test_there_is_such_a_block() -> None:
    assert any(block.runs for block in OF_TORCHRL)


def test_a_server_stamps_its_results_with_the_version(workers: LocalCluster) -> None:
    policy = make_policy()
    sender = make_sender(policy, agent=workers["w0"], first_version=5)
    receiver = TelegradWeightSyncScheme(agent=workers["w1"])
    served = make_policy()
    transport = TelegradTransport("w1", agent=workers["w1"])
    with InferenceServer(served, transport, weight_sync=receiver, max_batch_size=4) as server:
        client = TelegradTransport("w1", agent=workers["w2"], timeout=PATIENCE).client()
        assert client(observation())["policy_version"] == 5
        for version in range(6, 10):
            fill(policy, version)
            sender.send()
            assert sender.versions() == {"w1": version}
            replies = [client.submit(observation()) for _ in range(6)]
            for reply in replies:
                result = reply.result(timeout=PATIENCE)
                assert result["policy_version"] == version
                assert result["action"].tolist() == [5.0 * version] * 2
        assert server.policy_version == sender.version == receiver.version == 9
        remote = PolicyClientModule(client, in_keys=["observation"], out_keys=["action"])
        assert remote(observation())["action"].tolist() == [45.0, 45.0]
        with pytest.raises(Exception, match="observation"):
            client(TensorDict({"other": torch.ones(4)}))
    receiver.shutdown()
    sender.shutdown()


def test_actors_of_a_lost_server_get_an_error(workers: LocalCluster) -> None:
    transport = TelegradTransport("w1", agent=workers["w1"])
    client = TelegradTransport("w1", agent=workers["w2"], timeout=PATIENCE).client()
    pending = client.submit(observation())
    transport.wait_for_work(PATIENCE)
    workers.kill("w1")
    with pytest.raises(errors.PeerLost):
        pending.result(timeout=PATIENCE)


def test_an_actor_may_start_before_its_server(workers: LocalCluster) -> None:
    actor = TelegradTransport("late", agent=workers["w0"], timeout=PATIENCE)
    joins = threading.Thread(target=workers.join, args=("late",))
    joins.start()
    reply = actor.submit(observation())
    joins.join()
    server = TelegradTransport("late", agent=workers["late"])
    server.wait_for_work(PATIENCE)
    _, (callback,) = server.drain(1)
    server.resolve(callback, observation())
    assert reply.result(timeout=PATIENCE)["observation"].tolist() == [1.0] * 4


def test_a_transport_serves_only_where_it_says(workers: LocalCluster) -> None:
    with pytest.raises(errors.UsageError, match="'w1'"):
        TelegradTransport("w1", agent=workers["w0"]).drain(1)


def test_versions_are_received_when_asked_for(workers: LocalCluster) -> None:
    policy, copy = make_policy(), make_policy()
    sender = make_sender(policy, agent=workers["w0"], sync=False)
    receiver = TelegradWeightSyncScheme(agent=workers["w1"], background=False)
    receive(receiver, copy)
    assert torch.equal(copy.module.weight, policy.module.weight)
    assert receiver.receive(timeout=0.0) is None
    assert receiver.receive(timeout=0.01) is None
    fill(policy, 3)
    sender.send()
    assert receiver.receive(timeout=PATIENCE) is not None
    assert copy.module.weight.eq(3).all()
    assert isinstance(copy.module.weight, nn.Parameter)
    sender.send(TensorDict.from_module(policy))  # TorchRL's other forms of weights
    sender.send(policy)
    sender.send(dict(policy.state_dict()))
    assert sender.version == 4
    receiver.shutdown()
    receiver.shutdown()
    sender.shutdown()


def test_weights_that_cannot_be_sent(workers: LocalCluster) -> None:
    sender = make_sender(make_policy(), agent=workers["w0"])
    with pytest.raises(errors.UsageError, match="worker_ids"):
        sender.send(worker_ids=[1])
    with pytest.raises(errors.UsageError, match="tensors by name"):
        sender.send({0: TensorDict({"a": torch.ones(1)})})
    with pytest.raises(errors.UsageError, match="shapes"):
        sender.send(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="init_on_sender"):
        TelegradWeightSyncScheme(agent=workers["w1"]).send()
    empty = TelegradWeightSyncScheme(agent=workers["w1"])
    empty.init_on_sender()
    with pytest.raises(errors.UsageError, match="no model"):
        empty.connect()
    sender.shutdown()


def test_a_sender_gets_the_error_of_a_worker(workers: LocalCluster) -> None:
    policy, copy = make_policy(), make_policy()
    sender = make_sender(policy, agent=workers["w0"])
    receiver = TelegradWeightSyncScheme(agent=workers["w1"])
    receive(receiver, copy)
    copy.module = nn.Linear(7, 7)
    with pytest.raises(KeyError, match="Error updating"):
        sender.send()
    copy.module = nn.Linear(4, 2)
    sender.send()
    assert sender.versions() == {"w1": 2}
    receiver.shutdown()
    sender.shutdown()


def test_copies_have_the_settings_alone(workers: LocalCluster) -> None:
    sender = make_sender(make_policy(), agent=workers["w0"], first_version=3)
    copy = pickle.loads(pickle.dumps(sender))
    assert (copy.name, copy.version, copy.initialized_on_sender) == ("policy", None, False)
    transport = pickle.loads(pickle.dumps(TelegradTransport("w1", agent=workers["w0"])))
    assert transport.server == "w1"
    with pytest.raises(errors.UsageError, match="no agent"):
        transport.submit(observation())
    sender.shutdown()

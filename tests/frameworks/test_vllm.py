"""vLLM: its real registries, base classes and layerwise reloading, without a GPU and an engine."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of these packages, when they are imported
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-registries")
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed import weight_transfer as transfer
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from telegrad.integrations.vllm import TelegradTrainerInitInfo

pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE = 60.0


class Model(nn.Module):
    """A model as vLLM has it: it loads weights as they are in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 20, bias=False, dtype=torch.bfloat16)
        record_metadata_for_reloading(self)  # as vLLM does when it makes a model

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor)


class Client:
    """Does what vLLM's workers do (`vllm.v1.worker.gpu_worker`) with what its clients send."""

    def __init__(self, workers: int) -> None:
        config, whole = WeightTransferConfig(backend="telegrad"), Whole()
        create = transfer.WeightTransferEngineFactory.create_engine
        device = torch.device("cpu")
        self.engines = [create(config, whole, device, Model()) for _ in range(workers)]
        self.version: str | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(json.loads(json.dumps(init_info))))

    def start_weight_update(self) -> None:
        self.each("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        for engine in self.engines:  # `engine.update_weights` also synchronizes the GPU
            engine.receive_weights(engine.parse_update_info(json.loads(json.dumps(update_info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.each("finish_weight_update")
        self.version = weight_version

    def shutdown(self) -> None:
        self.each("shutdown")

    def each(self, method: str) -> None:
        for engine in self.engines:
            getattr(engine, method)()


class Whole(SimpleNamespace):
    """The parts of vLLM's configuration that engines have."""

    parallel_config = None
    model_config = SimpleNamespace(dtype=torch.bfloat16, quantization=None)


def test_the_client_is_one_of_vllm() -> None:
    assert isinstance(Client(0), transfer.VLLMWeightSyncClient)


def test_versions_reach_all_workers() -> None:
    client = Client(2)
    module = Model()
    options = {"client": client, "source": transfer.ModuleSource(module)}

    def start(rank: int) -> Any:
        info = TelegradTrainerInitInfo(rank=rank, timeout=PATIENCE)
        return transfer.WeightTransferTrainerFactory.trainer_init(info, **options)

    trainer, other = start(0), start(1)
    try:
        for version in (1, 2, 3):
            with torch.no_grad():
                module.layer.weight.normal_()
            other.send_weights()
            trainer.send_weights()
            assert trainer.version == version
            assert client.version == str(version)
            for engine in client.engines:
                assert engine.version == version
                assert torch.equal(engine.model.layer.weight, module.layer.weight)
        trainer.shutdown()
        trainer = start(0)  # the trainer is restarted
        with torch.no_grad():
            module.layer.weight.normal_()
        trainer.send_weights()
        for engine in client.engines:
            assert torch.equal(engine.model.layer.weight, module.layer.weight)
    finally:
        client.shutdown()
        client.shutdown()
        trainer.shutdown()
        other.shutdown()


def test_what_is_missing_is_named() -> None:
    client = Client(1)
    with pytest.raises(errors.UsageError, match="init_weight_transfer_engine"):
        client.update_weights({"version": 1})
    with pytest.raises(errors.UsageError, match="WeightSource"):
        transfer.WeightTransferTrainerFactory.trainer_init(
            TelegradTrainerInitInfo(rank=0), client=client
        )
    with pytest.raises(ValueError, match="TelegradWeightTransferEngine"):
        client.engines[0].parse_init_info({"port": 1})

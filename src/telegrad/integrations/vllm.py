"""vLLM: a backend ``telegrad`` of its weight-transfer registry, for the workers and the trainer.

Written for the interface of vLLM 0.32 (`vllm.distributed.weight_transfer`). The tests use the real
base classes and registries, on a machine without a GPU; an engine that generates was not run.

vLLM loads this module in all its processes (entry point ``vllm.general_plugins``). The trainer
publishes a version, and vLLM tells its workers the number. A worker loads the tensors from memory
that all workers of its host share.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

try:
    from vllm.distributed.weight_transfer import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
except ImportError as error:
    raise ImportError(
        f"telegrad.integrations.vllm needs vLLM ({error}): pip install 'telegrad[vllm]'"
    ) from error

from telegrad.errors import UsageError
from telegrad.integrations.membership import Membership
from telegrad.integrations.stream_publisher import StreamPublisher
from telegrad.timeouts import duration
from telegrad.weights import Subscriber

__all__ = ["TelegradTrainerEngine", "TelegradTrainerInitInfo", "TelegradWeightTransferEngine"]

BACKEND = "telegrad"


@dataclass
class TelegradInitInfo(WeightTransferInitInfo):
    """What a worker needs to join the group of the trainer."""

    store: str
    name: str
    timeout: float


@dataclass
class TelegradUpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


class TelegradWeightTransferEngine(WeightTransferEngine[TelegradInitInfo, TelegradUpdateInfo]):
    """Loads published versions into the model of a worker."""

    init_info_cls = TelegradInitInfo
    update_info_cls = TelegradUpdateInfo

    version: int | None = None
    """The version that was loaded last."""
    _membership: Membership | None = None
    _subscriber: Subscriber | None = None
    _timeout = 0.0

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reading = ExitStack()  # the version that is being loaded

    def init_transfer_engine(self, init_info: TelegradInitInfo) -> None:
        """Join the group of the trainer. A trainer that was restarted calls this again."""
        self.shutdown()
        self._timeout = duration(init_info.timeout, positive=True)
        self._membership = Membership(store=init_info.store)
        agent = self._membership.agent(prefix=f"{init_info.name}-vllm")
        self._subscriber = Subscriber(init_info.name, agent=agent)

    def start_weight_update(self) -> None:
        """Let vLLM prepare the layers for weights as they are in a checkpoint."""
        # Here and below: these modules are large, and a trainer does not need them.
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            initialize_layerwise_reload,
        )

        self._reading.close()  # of an update that failed
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TelegradUpdateInfo) -> None:
        """Wait for a version and load it."""
        from vllm.model_executor.model_loader.mtp_validation import (  # noqa: PLC0415
            disable_mtp_completeness_check,
        )

        if self._subscriber is None:
            raise UsageError("the trainer has not called init_weight_transfer_engine")
        self._subscriber.newer_than(update_info.version - 1).result(self._timeout)
        # vLLM may keep tensors until all of their layer are loaded, at the latest until the end.
        view = self._subscriber.view(timeout=self._timeout)
        version, tensors = self._reading.enter_context(view)
        with disable_mtp_completeness_check():
            self.model.load_weights(iter(tensors.items()))
        self.version = version

    def finish_weight_update(self) -> None:
        """Let vLLM convert the weights to the form in which it uses them."""
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)
        self._reading.close()

    def shutdown(self) -> None:
        """Leave the group. May be repeated."""
        self._reading.close()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._membership is not None:
            self._membership.close()
        self._subscriber = self._membership = None


@dataclass
class TelegradTrainerInitInfo(TrainerInitInfo):
    """Settings of the trainer. `name` is that of the weights in the group.

    The trainer uses its current agent if it has one, and needs the address of its group's store
    then. Otherwise it joins the group at `store`, or makes one at the address `host`. `timeout`
    is for one update, in seconds.
    """

    backend: ClassVar[str] = BACKEND

    name: str = "policy"
    store: str | None = None
    host: str = "127.0.0.1"
    timeout: float = 300.0


class TelegradTrainerEngine(TrainerWeightTransferEngine[TelegradTrainerInitInfo]):
    """Publishes a version of the trainer's weights and lets vLLM load it."""

    init_info_cls = TelegradTrainerInitInfo

    _membership: Membership | None = None
    _publisher: StreamPublisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: TelegradTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TelegradTrainerEngine:
        """Return an engine. The one of rank 0 lets the workers join its group."""
        if source is None:
            raise UsageError("the backend 'telegrad' needs a WeightSource")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            name = init_info.name
            membership = engine._membership = Membership(store=init_info.store)
            agent = membership.agent_of_host(f"{name}-trainer", init_info.host)
            if membership.store is None:
                raise UsageError("pass `store`, so that the workers of vLLM can join this group")
            engine._publisher = StreamPublisher(name, agent)
            client.init_weight_transfer_engine(
                {
                    "store": membership.store,
                    "name": engine._publisher.name,
                    "timeout": duration(init_info.timeout, positive=True),
                }
            )
        return engine

    @property
    def version(self) -> int:
        """The version that was sent last; 0 before the first. Ranks other than 0 have none."""
        return 0 if self._publisher is None else self._publisher.version

    def send_weights(self) -> None:
        """Publish the weights of the source, and return when vLLM uses them."""
        if self._publisher is None:
            for _ in self.source:  # the ranks gather each tensor together
                pass
            return
        version = self._publisher.publish(self.source)
        self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update(weight_version=str(version))

    def shutdown(self) -> None:
        """Stop publishing and leave the group. May be repeated."""
        if self._publisher is not None:
            self._publisher.close()
        if self._membership is not None:
            self._membership.close()


WeightTransferEngineFactory.register_engine(BACKEND, TelegradWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, TelegradTrainerEngine)


def register() -> None:
    """Do nothing: importing this module registers the backend. vLLM calls this when it starts."""

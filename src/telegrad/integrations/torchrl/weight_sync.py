"""`TelegradWeightSyncScheme`: weights from a trainer to collectors and inference servers.

The trainer publishes versions (`telegrad.weights`), and each worker copies the newest one into its
policy: on a thread, or when its `InferenceServer` asks for it.

State: `_progress`, the version in use, and `_received`, its tensors, are changed under
`_receiving`. A copy in another process has the settings alone.
"""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import WeightSyncScheme

from telegrad.agent import Agent
from telegrad.errors import CallTimeout, PeerLost, StaleReference, TelegradError, UsageError
from telegrad.integrations.membership import Membership
from telegrad.integrations.progress import ProgressRegistry, VersionProgress, wait_for_workers
from telegrad.timeouts import time_limit
from telegrad.weights import Publisher, Subscriber

_logger = logging.getLogger(__name__)
_PATIENCE = 1.0  # seconds in which a version that has arrived can be read


class TelegradWeightSyncScheme(WeightSyncScheme):
    """Synchronizes the weights of a model from a trainer to any number of workers.

    `name` is that of the weights in the group. A process uses `agent`, else its current agent, else
    it joins the group whose store is at `store` (``host:port``). Without these, the trainer makes a
    group, which the workers of its collector join.

    With `sync`, `send` returns when all workers use the new version, and raises `CallTimeout` after
    `timeout` seconds. Workers that are lost are not waited for. `background` says whether a thread
    applies new versions; None: unless an `InferenceServer` does. Without it, `receive` does.
    """

    def __init__(
        self,
        name: str = "policy",
        *,
        agent: Agent | None = None,
        store: str | None = None,
        sync: bool = True,
        timeout: float | None = 60.0,
        background: bool | None = None,
        first_version: int = 0,
        strategy: str = "tensordict",
    ) -> None:
        super().__init__(strategy)
        self.name = name
        self.sync = sync
        self.timeout: float | None = time_limit(timeout)
        self._background = background
        self._first_version = first_version
        self._membership = Membership(agent, store)
        self._reset()

    def _reset(self) -> None:
        self._publisher: Publisher | None = None
        self._published: dict[str, Tensor] = {}
        self._subscriber: Subscriber | None = None
        self._received: Any = None
        self._progress = VersionProgress()
        self._receiving = threading.RLock()
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in vars(self).keys() & _OF_PROCESS:
            del state[name]
        return state  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._membership = copy.copy(self._membership)  # without the agent: this may be a fork
        self._reset()

    def __del__(self) -> None:
        """Do nothing: what `shutdown` closes would block the garbage collector."""

    @property
    def store(self) -> str | None:
        """The address of the group's store, if workers join through one."""
        return self._membership.store

    @property
    def version(self) -> int | None:
        """The version that was sent last, or the one that this worker uses."""
        return self._progress.version if self._publisher is None else self._publisher.version

    def versions(self) -> dict[str, int]:
        """Return the version that each worker uses, by its name. Only the sender calls this."""
        return wait_for_workers(self._membership.agent(), self.name, None, self.timeout)

    def create_transport(self, **_: Any) -> Any:
        """Return the scheme: one version serves all workers, so it needs none for each of them."""
        return self

    # The sender

    def _init_on_sender_impl(
        self, *, model_id: str = "policy", context: Any = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        self.context = context
        if model is not None:
            self.model = model
        self._membership.agent_of_host(f"{self.name}-sender")

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self._publish(weights)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish a version: of `weights`, or of the model. Every worker gets it."""
        if not self.synchronized_on_sender:
            raise RuntimeError("call init_on_sender and connect before send")
        if worker_ids is not None:
            raise UsageError("a version reaches all workers: `worker_ids` is not supported")
        version = self._publish(weights)
        if self.sync:
            wait_for_workers(self._membership.agent(), self.name, version, self.timeout)

    send_weights = send

    def _publish(self, weights: Any) -> int:
        if weights is None and self._model_ref is not None:
            weights = self.model
        weights = self.prepare_weights(weights, self.model_id, self.strategy, self.context)
        if weights is None:
            raise UsageError(f"there is no model {self.model_id!r} whose weights can be sent")
        self._published.clear()
        self._published.update(_by_name(weights))
        if self._publisher is not None:
            return self._publisher.publish()
        agent = self._membership.agent()
        self._publisher = Publisher(self._published, self.name, agent=agent)
        return self._publisher.publish(self._first_version)

    # The receiver

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        self.model_id = model_id
        self.worker_idx = worker_idx
        if context is not None:
            self.context = context
        if model is not None:
            self.model = model
        agent = self._membership.agent(prefix=self.name)
        self._subscriber = Subscriber(self.name, agent=agent)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        model = self.model
        if model is None:
            raise UsageError(f"there is no model {self.model_id!r} for the weights")
        # A collector sends its workers a policy without values.
        has_values = not any(tensor.is_meta for tensor in model.state_dict().values())
        version = self._apply(inplace=has_values, timeout=self.timeout)
        self._set_version(version)
        ProgressRegistry.of(self._membership.agent()).add(self.name, self._progress)
        background = self._background
        if background is None:
            background = not isinstance(self.context, InferenceServer)
        if background:
            self._start_background_receiver()

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Apply the newest version, and return it. None if there is none in `timeout` seconds."""
        if self._subscriber is None or not self.synchronized_on_receiver:
            raise RuntimeError("call init_on_receiver and connect before receive")
        if not self._is_newer(timeout):
            return None
        with self._receiving:
            newest = self._subscriber.version
            try:
                version = self._apply(inplace=True, timeout=_PATIENCE)
                self._tell_context()
            except (CallTimeout, PeerLost, StaleReference):
                return None  # its source is lost, and another one will follow
            except Exception as error:
                self._progress.fail(newest, error)
                raise
            self._set_version(version)
            return self._received

    def receive_weights(self, timeout: float | None = None, **_: Any) -> TensorDictBase | None:
        """Do what `receive` does."""
        return self.receive(timeout)

    def shutdown(self) -> None:
        """Stop sending or receiving. May be repeated."""
        if self._closed:
            return
        self._closed = True
        if self._stop_event is not None:
            self._stop_event.set()
        if self._subscriber is not None:
            ProgressRegistry.of(self._membership.agent()).remove(self.name, self._progress)
            self._subscriber.close()
        if self._publisher is not None:
            self._publisher.close()
        super().shutdown()
        self._membership.close()

    def _is_newer(self, timeout: float | None) -> bool:
        """Wait until a version is there that was not tried yet."""
        assert self._subscriber is not None
        timeout = time_limit(timeout)
        if timeout is not None and timeout <= 0:
            newest = self._subscriber.version
            return newest is not None and newest != self._progress.tried
        future = self._subscriber.newer_than(self._progress.tried)
        try:
            future.result(timeout)
        except CallTimeout:
            future.cancel()
            return False
        return True

    def _apply(self, inplace: bool, timeout: float | None) -> int:
        assert self._subscriber is not None
        if self._received is None:
            version, tensors = self._subscriber.state_dict(timeout=timeout)
            self._received = TensorDict(tensors).unflatten_keys(".")
        else:
            version = self._subscriber.pull_into(_by_name(self._received), timeout=timeout)
        self._progress.tried = version
        self.strategy.apply_weights(self.model, self._received, inplace=inplace)
        return version

    def _tell_context(self) -> None:
        """Let a collector pass the weights on to workers of its own."""
        context = self.context
        if hasattr(context, "update_policy_weights_") and not isinstance(context, InferenceServer):
            context.update_policy_weights_(model_id=self.model_id, policy_or_weights=self._received)

    def _set_version(self, version: int) -> None:
        """Let the data of a collector or server have this version, then tell the sender."""
        context = self.context
        tracker: Any = getattr(context, "policy_version_tracker", None)
        if isinstance(context, InferenceServer):
            context._mark_weight_update(version)  # it has no public method with a version
        elif hasattr(tracker, "version"):
            tracker.version = version
        self._progress.set(version)

    def _background_receive_loop(self) -> None:
        stop = self._stop_event
        while not stop.is_set():
            try:
                self._is_newer(None)
            except TelegradError:  # the subscriber or the agent is closed
                return
            try:
                self.receive(timeout=0.0)
            except Exception as error:  # the next version may be one that can be used
                if not stop.is_set():
                    version = self._progress.tried
                    _logger.warning("version %s was not applied: %s", version, error)


_OF_PROCESS = {
    "_publisher",
    "_published",
    "_subscriber",
    "_received",
    "_progress",
    "_receiving",
    "_closed",
}


def _by_name(weights: Any) -> dict[str, Tensor]:
    """Return the tensors of a module, TensorDict or `state_dict` by name."""
    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    if isinstance(weights, TensorDictBase):
        weights = weights.flatten_keys(".")
    tensors = dict(weights.items())
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UsageError(
                f"weights are tensors by name, but {name!r} is a {type(value).__name__}"
            )
    return tensors

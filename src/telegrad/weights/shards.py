"""The shards of a publisher, and the slices of them that subscribers get.

Each of several trainers may publish its own part of the weights, its shard, under one name.
Subscribers ask for boxes of its tensors. All subscribers with the same boxes share a store
of versions that have only these boxes: it is coded once, and passed on from host to host like any
other. Subscribers put a version together when they have its slices from all shards (`sliced`).

State of `SliceServer`, under `_lock`: `_served`, the stores of slices by key.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from telegrad.errors import StaleReference, UsageError
from telegrad.weights.boxes import Box, Piece, is_first_copy, is_sharded, local_of, piece_of
from telegrad.weights.layout import entry_of
from telegrad.weights.service import PublisherEntry, WeightsRegistry
from telegrad.weights.streams import Image
from telegrad.weights.topology import Topology
from telegrad.weights.versions import VersionStore, is_newer


@dataclass(frozen=True)
class ShardInfo:
    """What one of `count` publishers of a name publishes."""

    epoch: str
    index: int
    count: int
    pieces: dict[str, Piece]
    absent: frozenset[str]  # tensors without values, on the meta device


class _Served(NamedTuple):
    store: VersionStore
    boxes: dict[str, Box]


def number_of(tensors: Mapping[str, Tensor], shard: tuple[int, int] | None) -> tuple[int, int]:
    """Return the number of this shard and how many there are."""
    if shard is None:
        if is_sharded(tensors) and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1
    try:
        index, count = map(int, shard)
    except (TypeError, ValueError):
        raise UsageError(f"shard is a number and how many there are, not {shard!r}") from None
    if not 0 <= index < count:
        raise UsageError(f"shard is (number, count) with a number below the count, not {shard!r}")
    return index, count


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of each tensor that this worker publishes: not those of another copy."""
    # tied tensors are the same object, and so are their parts
    parts = {id(tensor): local_of(tensor) for tensor in tensors.values()}
    return {name: parts[id(tensor)] for name, tensor in tensors.items() if is_first_copy(tensor)}


def describe(tensors: Mapping[str, Tensor], epoch: str, index: int, count: int) -> ShardInfo:
    """Return what this worker publishes."""
    pieces, absent = {}, set()
    for name, tensor in tensors.items():
        piece = piece_of(name, tensor)
        if piece is not None and is_first_copy(tensor):
            pieces[name] = piece
        if tensor.is_meta:
            absent.add(name)
    return ShardInfo(epoch, index, count, pieces, frozenset(absent))


class SliceServer:
    """Makes the versions of slices from those of a publisher."""

    def __init__(
        self,
        name: str,
        info: ShardInfo,
        source: VersionStore,
        registry: WeightsRegistry,
        *,
        fan_out: int,
        history: int,
        on_new: Callable[[], None],
    ) -> None:
        self.info = info
        self._name = name
        self._source = source
        self._registry = registry
        self._fan_out = fan_out
        self._history = history
        self._on_new = on_new
        self._served: dict[str, _Served] = {}
        self._lock = threading.Lock()

    def serve(self, key: str, boxes: dict[str, Box]) -> None:
        """Make a store of these boxes, if there is none."""
        with self._lock:
            if key in self._served:
                return
            for name, box in boxes.items():
                piece = self.info.pieces.get(name)
                if piece is None or piece.box.intersect(box) != box:
                    raise StaleReference(f"this shard of {self._name!r} has other boxes now")
            store = VersionStore(
                f"{self.info.epoch}-{secrets.token_hex(4)}",
                self._source.layout.part(boxes),
                shared=False,
                history=self._history,
                bandwidth=self._source.bandwidth,
            )
            topology = Topology(self._registry.runtime.name, None, self._fan_out)
            self._registry.add_publisher(key, PublisherEntry(store, topology, self._history))
            self._served[key] = _Served(store, boxes)
        self._source.note_reader()
        self._on_new()

    def is_behind(self) -> bool:
        """Return whether the publisher has a version that `update` would add."""
        with self._lock:
            return any(self._is_behind(each) for each in self._served.values())

    def update(self, add: Callable[[VersionStore, Image, int], object]) -> None:
        """Let `add` add the newest version of the publisher to each store that has subscribers.

        Only the thread that completes the versions of the publisher calls this.
        """
        image = self._source.current()
        if image is None:
            return
        for served in self._in_use():
            if self._is_behind(served):
                part = served.store.take_image()
                views = {
                    name: box.of(self._tensor(image, name), self.info.pieces[name].box)
                    for name, box in served.boxes.items()
                }
                served.store.layout.write(views, part.contents)
                add(served.store, part, image.version)

    def _tensor(self, image: Image, name: str) -> Tensor:
        return entry_of(image.contents, self._source.layout.entries[name])

    def _is_behind(self, served: _Served) -> bool:
        return is_newer(self._source.version, served.store.version)

    def _in_use(self) -> list[_Served]:
        """Remove the stores that have no subscribers, and return the others."""
        with self._lock:
            for key in list(self._served):
                served = self._served[key]
                # a store that is new has subscribers only in a moment
                if served.store.version is not None and self._registry.remove_unused(key):
                    del self._served[key]
            return list(self._served.values())

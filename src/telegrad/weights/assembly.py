"""A version that is put together from the slices of several shards.

State: that of `Complete` is changed under the lock of `SlicedVersions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.weights.boxes import Box, Piece, Slices, local_of, piece_of, sliced, whole
from telegrad.weights.layout import Rename, entry_of, renamed
from telegrad.weights.leases import Lease
from telegrad.weights.planning import Plan, Source
from telegrad.weights.versions import VersionStore


@dataclass(eq=False)
class Hold:
    """A version of the slices from one shard. Its image is not written while this is held."""

    source: Source
    store: VersionStore
    version: int
    lease: Lease
    owners: int = 1

    def release(self) -> None:
        """End the use by one owner."""
        self.owners -= 1
        if not self.owners:
            self.store.release(self.lease.ticket)


@dataclass(eq=False)
class Complete:
    """The slices of one version from all shards."""

    plan: Plan
    holds: list[Hold]
    users: set[str] = field(default_factory=set)  # tickets
    is_released: bool = False

    @property
    def version(self) -> int:
        return self.holds[0].version if self.holds else 0

    @property
    def epochs(self) -> list[str]:
        return sorted(hold.store.epoch for hold in self.holds)


class SlicedVersion:
    """A complete version, which does not change while it is read."""

    def __init__(self, complete: Complete, slices: Slices) -> None:
        self.version = complete.version
        self._complete = complete
        self._slices = slices

    def copies(
        self, target: Mapping[str, Tensor], names: Rename | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parts of tensors to write, each with its values."""
        found = []
        for name, published, tensor in renamed(target, names):
            piece = piece_of(name, tensor)
            if published in self._complete.plan.absent or tensor.is_meta or piece is None:
                continue
            subscribed = self._complete.plan.pieces.get(published)
            if subscribed is None:
                raise UsageError(f"{published!r} for {name!r} is not among what was subscribed to")
            box, shape = piece.box, piece.shape
            if published in self._slices and piece.box == whole(shape):
                box, shape = sliced(published, self._slices[published], subscribed.shape), ()
                if box.sizes != piece.shape:
                    raise UsageError(
                        f"{name!r} has the shape {piece.shape}, and the slices of {published!r} "
                        f"have {box.sizes}"
                    )
            elif shape != subscribed.shape:
                raise UsageError(
                    f"{name!r} has the shape {shape}, and the published tensor {published!r} has "
                    f"{subscribed.shape}"
                )
            if box.intersect(subscribed.box) != box:
                raise UsageError(f"{name!r} has other shards than when it was subscribed to")
            local = local_of(tensor)
            for part, values in self._parts(published):
                common = part.intersect(box)
                if common.volume:
                    found.append((common.of(local, box), common.of(values, part)))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors, each with the box that was subscribed to."""
        return {name: self._joined(name, piece) for name, piece in self._pieces.items()}

    def views(self) -> dict[str, Tensor]:
        """Return all tensors, without a copy if they come from one shard."""
        found = {}
        for name, piece in self._pieces.items():
            parts = list(self._parts(name))
            is_whole = len(parts) == 1 and parts[0][0] == piece.box
            found[name] = parts[0][1] if is_whole else self._joined(name, piece)
        return found

    @property
    def _pieces(self) -> dict[str, Piece]:
        return self._complete.plan.pieces

    def _joined(self, name: str, piece: Piece) -> Tensor:
        joined = torch.empty(piece.box.sizes, dtype=piece.dtype)
        for part, values in self._parts(name):
            part.of(joined, piece.box).copy_(values)
        return joined

    def _parts(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        for hold in self._complete.holds:
            box = hold.source.boxes.get(name)
            if box is not None:
                image = hold.store.image_of(hold.lease.ticket).contents
                yield box, entry_of(image, hold.store.layout.entries[name])

"""Which boxes a worker gets from which shard. There is no state here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from telegrad.errors import UsageError
from telegrad.weights.boxes import Box, Piece, Slices, as_slices, piece_of, sliced
from telegrad.weights.layout import Rename, renamed
from telegrad.weights.shards import ShardInfo


class Wanted(NamedTuple):
    """What a subscriber gets: pieces by published name, and slices in terms of the whole."""

    pieces: dict[str, Piece]
    slices: Slices


class Source(NamedTuple):
    """A shard, the worker that publishes it, and the boxes that come from it."""

    worker: str
    key: str  # of the store of these boxes
    boxes: dict[str, Box]


class Plan(NamedTuple):
    """The pieces that a worker gets, and their sources by key."""

    pieces: dict[str, Piece]
    absent: frozenset[str]
    sources: dict[str, Source]


def wanted(tensors: Mapping[str, Tensor], names: Rename | None, slices: Slices | None) -> Wanted:
    """Return what is needed for tensors and slices."""
    if not isinstance(slices, Mapping | None):
        raise UsageError(f"`slices` is a dict of slices by name, not {type(slices).__name__}")
    slices = {name: as_slices(name, each) for name, each in (slices or {}).items()}
    pieces: dict[str, Piece] = {}
    for name, published, tensor in renamed(tensors, names):
        piece = piece_of(name, tensor)
        if piece is None or published in slices or tensor.is_meta:
            continue
        if pieces.setdefault(published, piece).box != piece.box:
            raise UsageError(f"{name!r} and another tensor are different parts of {published!r}")
    return Wanted(pieces, slices)


def make_plan(name: str, found: Mapping[str, ShardInfo], wanted: Wanted) -> Plan | None:
    """Return from which of these shards, by worker, everything comes; None if some are missing.

    If several shards have the same box, such as a plain tensor, it comes from the first of them.
    """
    shards = _complete_set(found)
    if shards is None:
        return None
    absent = frozenset[str]().union(*(info.absent for _, info in shards))
    pieces = _published(name, shards, wanted, absent)
    boxes: list[dict[str, Box]] = [{} for _ in shards]
    for tensor, piece in pieces.items():
        seen: set[Box] = set()
        volume = 0
        for (_, info), selected in zip(shards, boxes, strict=True):
            held = info.pieces.get(tensor)
            if held is None or held.box in seen:
                continue
            seen.add(held.box)
            common = held.box.intersect(piece.box)
            if common.volume:
                volume += common.volume
                selected[tensor] = common
        if volume != piece.box.volume:
            raise UsageError(
                f"the {len(shards)} shards of {name!r} have {volume} of {piece.box.volume} "
                f"elements of {tensor!r}"
            )
    sources = {}
    for (publisher, info), selected in zip(shards, boxes, strict=True):
        if selected:
            key = _key(name, info, selected)
            sources[key] = Source(publisher, key, selected)
    if not sources:
        raise UsageError(f"the subscriber gets no tensor of {name!r}")
    return Plan(pieces, absent, sources)


def _complete_set(found: Mapping[str, ShardInfo]) -> list[tuple[str, ShardInfo]] | None:
    """Return the worker and the description of each shard, in order, if none is missing.

    If there are publishers of two runs, those that were started last are taken.
    """
    newest: dict[tuple[int, int], tuple[str, ShardInfo]] = {}
    for worker, info in found.items():
        place = info.count, info.index
        if place not in newest or newest[place][1].epoch < info.epoch:
            newest[place] = worker, info
    complete = [
        [newest[count, index] for index in range(count)]
        for count in {count for count, _ in newest}
        if all((count, index) in newest for index in range(count))
    ]
    return max(complete, key=lambda each: max(info.epoch for _, info in each), default=None)


def _published(
    name: str, shards: list[tuple[str, ShardInfo]], wanted: Wanted, absent: frozenset[str]
) -> dict[str, Piece]:
    """Return the wanted pieces, with the published shape and dtype."""
    published: dict[str, Piece] = {}
    for _, info in shards:
        published.update(info.pieces)
    pieces = {}
    for tensor in (*wanted.pieces, *wanted.slices):
        if tensor in absent:
            continue
        piece = published.get(tensor)
        if piece is None:
            raise UsageError(
                f"the published weights {name!r} have no tensor {tensor!r}; pass `names` to rename "
                "tensors or to leave some out"
            )
        if tensor in wanted.slices:
            box = sliced(tensor, wanted.slices[tensor], piece.shape)
        else:
            box = wanted.pieces[tensor].box
            if wanted.pieces[tensor].shape != piece.shape:
                raise UsageError(
                    f"{tensor!r} is published with the shape {piece.shape}, and the tensor of the "
                    f"subscriber has {wanted.pieces[tensor].shape}"
                )
        pieces[tensor] = piece._replace(box=box)
    return pieces


def _key(name: str, info: ShardInfo, boxes: dict[str, Box]) -> str:
    """Return the name of the store of these boxes: the same for all workers that get them."""
    digest = hashlib.sha256(repr(sorted(boxes.items())).encode()).hexdigest()
    return f"{name}\0shard {info.index} of {info.count}: {digest}"

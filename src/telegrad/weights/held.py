"""`HeldWeights`: which version the tensors that a subscriber has written still hold.

A pull with `have` writes only what changed since that version. That is right only if the tensors
hold it to the last bit. So after each pull, the subscriber notes for every tensor its memory and
PyTorch's counter of writes (`_version`), which every operation in place increments, also that of an
optimizer. If one differs at the next pull, everything is copied. Writes that PyTorch does not
count, such as through `.data` or NumPy, are searched for by comparing values: the old values of all
changes, a sample of each tensor, and a part of it that is another one each time. If such a write is
found, everything is copied, and there is a warning.

State: `_records` of the last pulls is replaced and not changed. `_active`, the pulls
under way in this process, is changed under `_lock`: two pulls into the same memory at a time may
leave a mix, of which nothing is noted.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from telegrad.weights.changes import Changes, Target, write_changes
from telegrad.weights.integers import Bytes

if TYPE_CHECKING:
    from telegrad.weights.reading import ReadVersion

Copies = list[tuple[Tensor, Tensor]]
Stamp = tuple[object, ...]

_RECORDS = 4  # models of one subscriber
_SAMPLES = 64  # elements of a tensor that are compared each time
_TURNS = 32  # pulls after which all elements have been compared

_HOST = torch.device("cpu")
_UNCOUNTED = (
    "weights that were pulled have been written in a way that PyTorch does not count, such as "
    "through `.data` or NumPy, so all of them are copied; pull without `have` after such writes"
)

_lock = threading.Lock()


class Held(NamedTuple):
    """What tensors hold: the version of a publisher, and where in its image they are."""

    epoch: str
    version: int
    offsets: tuple[int, ...]
    stamps: tuple[Stamp, ...]
    memory: tuple[StorageWeakRef, ...]


class _Pull:
    """A pull under way."""

    def __init__(self, storages: frozenset[object]) -> None:
        self.storages = storages
        self.is_shared = False


_active: weakref.WeakSet[_Pull] = weakref.WeakSet()


class HeldWeights:
    """What the tensors hold that one subscriber has written."""

    def __init__(self) -> None:
        self._records: list[Held] = []
        self._turns = itertools.count()

    def find(self, tensors: Sequence[Tensor], version: int | None) -> Held | None:
        """Return what is known of tensors that hold a version; None if they may hold another."""
        stamps = None if version is None else _stamps(tensors)
        for held in list(self._records):
            if stamps is not None and held.version == version and held.stamps == stamps:
                gone = any(each.expired() for each in held.memory)  # type: ignore[no-untyped-call]
                return None if gone else held
        return None

    def write(
        self, tensors: Sequence[Tensor], copies: Copies, found: ReadVersion, held: Held | None
    ) -> None:
        """Write a version into tensors: only what changed if they hold what was before it."""
        offsets = tuple(_offset(source, found.image) for _, source in copies)
        pull = _begin(tensors)
        changes = None
        try:
            # another pull may have written them meanwhile
            if held is not None and held.stamps == _stamps(tensors) and held.offsets == offsets:
                changes = found.changes
            if changes is None or not self._write_changes(copies, offsets, changes):
                if changes is not None and not pull.is_shared:
                    warnings.warn(_UNCOUNTED, RuntimeWarning, stacklevel=5)
                _copy(copies)
        except BaseException:  # such as `KeyboardInterrupt`: never leave a mix of two versions
            _end(pull)
            _copy(copies)
            raise
        stamps = _stamps(tensors)
        if _end(pull) and stamps is not None and _are_separate(copies, offsets):
            memory = tuple(map(_memory, tensors))
            self._add(Held(found.epoch, found.version, offsets, stamps, memory))

    def _add(self, held: Held) -> None:
        kept = [each for each in self._records if each.memory[0].cdata != held.memory[0].cdata]
        self._records = [*kept[1 - _RECORDS :], held]

    def _write_changes(self, copies: Copies, offsets: Sequence[int], changes: Changes) -> bool:
        """Write changes. Return whether the tensors hold the new version then."""
        targets: dict[int, tuple[Target, Bytes]] = {}  # tied tensors are the same memory
        rest = []
        for (target, source), offset in zip(copies, offsets, strict=True):
            if _is_plain(target, source):
                targets[target.data_ptr()] = Target(offset, _bytes_of(target)), _bytes_of(source)
                torch.autograd.graph.increment_version(target)
            else:
                rest.append((target, source))
        turn = next(self._turns)
        is_right = write_changes(changes, [target for target, _ in targets.values()]) and not any(
            _differ(target.elements, source, turn) for target, source in targets.values()
        )
        if is_right:
            _copy(rest)
        return is_right


def copy_whole(copies: Copies) -> None:
    """Copy each source to its target, also if there is an exception."""
    try:
        _copy(copies)
    except BaseException:
        _copy(copies)
        raise


def _copy(copies: Copies) -> None:
    for target, source in copies:
        # a tensor made in inference mode can be written only there
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(source)


def _stamps(tensors: Sequence[Tensor]) -> tuple[Stamp, ...] | None:
    """Return where tensors are and how often they were written; None if that is not known."""
    if not tensors or any(each.is_inference() or _is_wrapper(each) for each in tensors):
        return None
    return tuple(
        (
            each.untyped_storage()._cdata,
            each.storage_offset(),
            each.shape,
            each.stride(),
            each.dtype,
            each._version,
        )
        for each in tensors
    )


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_wrapper(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _is_plain(target: Tensor, source: Tensor) -> bool:
    """Return whether a tensor has the same bytes as its source."""
    return (
        target.dtype == source.dtype
        and target.device == source.device == _HOST
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and target.numel() > 0
    )


def _bytes_of(tensor: Tensor) -> Bytes:
    # `reshape` would keep the stride of a single element, of which there are no bytes to view
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def _offset(source: Tensor, image: Tensor) -> int:
    return source.data_ptr() - image.data_ptr() if source.numel() else -1


def _are_separate(copies: Copies, offsets: Sequence[int]) -> bool:
    """Return whether tensors share memory only if they get the same values."""
    ranges = sorted(
        (target.data_ptr(), _span(target), offset)
        for (target, _), offset in zip(copies, offsets, strict=True)
        if target.numel()
    )
    return all(
        begin + span <= after or (begin, span, offset) == (after, *rest)
        for (begin, span, offset), (after, *rest) in itertools.pairwise(ranges)
    )


def _span(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of the last one."""
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int((1 + sum(steps)) * tensor.element_size())


def _differ(elements: Bytes, source: Bytes, turn: int) -> bool:
    """Compare a sample of a tensor, and a part that is another one in each turn."""
    step = max(1, elements.size // _SAMPLES)
    part = -(-elements.size // _TURNS)
    start = turn % _TURNS * part
    places = slice(turn % step, None, step), slice(start, start + part)
    return any(not np.array_equal(elements[place], source[place]) for place in places)


def _begin(tensors: Sequence[Tensor]) -> _Pull:
    pull = _Pull(frozenset(each.untyped_storage()._cdata for each in tensors))
    with _lock:
        for other in _active:
            if other.storages & pull.storages:
                other.is_shared = pull.is_shared = True
        _active.add(pull)
    return pull


def _end(pull: _Pull) -> bool:
    """Return whether no other pull has written the same memory meanwhile."""
    with _lock:
        _active.discard(pull)
        return not pull.is_shared

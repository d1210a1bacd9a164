"""`Layout`: where the tensors of a `state_dict` are in an image.

An image is one contiguous range of bytes with all tensors of a version. Tensors with elements of
the same width are next to each other, so that a delta is coded in a few long runs. Tensors that
share memory (tied weights) are there once if they are equal views; other overlapping views are
stored separately. Tensors on the meta device have no values: only their names, types and shapes are
kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.weights.boxes import Box, local_of
from telegrad.weights.deltas import Section

Weights = nn.Module | Mapping[str, Tensor]
_ALIGNMENT = 64  # bytes
_WIDTHS = (8, 4, 2, 1)


class Entry(NamedTuple):
    """A tensor of an image. `offset` is -1 if it has no values."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Content(NamedTuple):
    """A tensor of an image that gets its place. Those with the same identity get the same place."""

    width: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_values: bool
    identity: object


@dataclass(frozen=True)
class Layout:
    """The entries of an image by name, its sections and its size."""

    entries: dict[str, Entry]
    sections: tuple[Section, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of the images of these tensors."""
        return cls._of(
            {
                name: _Content(
                    _width(name, tensor),
                    tensor.dtype,
                    tuple(tensor.shape),
                    not tensor.is_meta,
                    _identity(tensor),
                )
                for name, tensor in tensors.items()
            }
        )

    def part(self, boxes: Mapping[str, Box]) -> Layout:
        """Return the layout of the images of these boxes of some of the tensors."""
        contents = {}
        for name, box in boxes.items():
            offset, dtype, _ = self.entries[name]
            identity = (offset, box) if offset >= 0 and box.volume else name
            contents[name] = _Content(_width_of(dtype), dtype, box.sizes, offset >= 0, identity)
        return self._of(contents)

    @classmethod
    def _of(cls, contents: Mapping[str, _Content]) -> Layout:
        entries: dict[str, Entry] = {}
        stored: dict[object, Entry] = {}  # by the identity of the memory
        sections = []
        end = 0
        for width in _WIDTHS:
            start = end
            for name, content in contents.items():
                if content.width != width:
                    continue
                entry = stored.get(content.identity)
                if entry is None:
                    offset = end if content.has_values else -1
                    entry = Entry(offset, content.dtype, content.shape)
                    stored[content.identity] = entry
                    if content.has_values:
                        end += _aligned(entry.nbytes)
                entries[name] = entry
            if end > start:
                sections.append(Section(start, end, width))
        in_order = {name: entries[name] for name in contents}
        return cls(in_order, tuple(sections), end)

    def write(self, tensors: Mapping[str, Tensor], image: Tensor) -> None:
        """Copy the values of all tensors into an image."""
        written = set()
        for name, entry in self.entries.items():
            if entry.offset >= 0 and entry.nbytes and entry.offset not in written:
                written.add(entry.offset)
                entry_of(image, entry).copy_(tensors[name].detach())

    def tensors(self, image: Tensor) -> dict[str, Tensor]:
        """Return the tensors of an image by name, as views. Equal entries are the same tensor."""
        views: dict[Entry, Tensor] = {}
        for entry in self.entries.values():
            if entry not in views:
                views[entry] = entry_of(image, entry)
        return {name: views[entry] for name, entry in self.entries.items()}


def entry_of(image: Tensor, entry: Entry) -> Tensor:
    """Return the tensor of an entry as a view of the image."""
    if entry.offset < 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    values = image[entry.offset : entry.offset + entry.nbytes]
    return values.view(entry.dtype).view(entry.shape)


Rename = Mapping[str, str] | Callable[[str], str | None]


def tensors_of(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of a module or of a `state_dict` by name, to publish them."""
    tensors = {}
    for name, value in _values_of(weights).items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{name!r} is of the type {type(value).__name__}, and only tensors can be "
                "published; pass a dict without it, such as `{name: value for name, value in "
                "model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}`, "
                "or with a tensor in its place"
            )
        tensors[name] = value
    return tensors


def targets_of(
    weights: Weights, names: Rename | None, *, is_part: bool = False
) -> dict[str, Tensor]:
    """Return the tensors into which weights are copied, by name.

    `names` may leave out values that are not tensors, and has only names of `weights`, unless these
    are a part of the model.
    """
    values = _values_of(weights)
    unknown = names.keys() - values.keys() if isinstance(names, Mapping) else set()
    if unknown and not is_part:
        raise UsageError(
            f"`names` has {', '.join(sorted(map(repr, unknown)))}, which the weights to "
            "write do not have; its keys are names of the model, its values are published names"
        )
    targets = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            targets[name] = value
        elif published_name(name, names) is not None:
            raise UsageError(
                f"{name!r} is of the type {type(value).__name__}, and only tensors can be "
                "written; leave it out with `names`"
            )
    return targets


def _values_of(weights: Weights) -> Mapping[str, object]:
    if isinstance(weights, nn.Module):
        # With `keep_vars`, tied parameters are the same object.
        weights = weights.state_dict(keep_vars=True)
    if not isinstance(weights, Mapping):
        raise UsageError(
            f"weights are a module or a dict of tensors by name, not {type(weights).__name__}"
        )
    return weights


def published_name(name: str, names: Rename | None) -> str | None:
    """Return the published name of a tensor; None if it is left out."""
    if names is None:
        return name
    if callable(names):
        return names(name)
    if isinstance(names, Mapping):
        return names.get(name)
    raise UsageError(f"`names` is a dict or a function, not {type(names).__name__}")


def check_target(weights: Weights, target: Mapping[str, Tensor], names: Rename | None) -> None:
    """Raise if a tensor that a pull writes cannot be written, or if that would change nothing.

    This is found before anything is written: an error in the middle would leave a mix of two
    versions.
    """
    owned: set[int] | None = None
    if isinstance(weights, nn.Module):
        owned = {_memory(each) for each in (*weights.parameters(), *weights.buffers())}
    for name, _, tensor in renamed(target, names):
        if tensor.is_meta or not tensor.numel():
            continue
        _require_dense(name, tensor, "written")
        if torch._debug_has_internal_overlap(local_of(tensor)) == 1:
            raise UsageError(f"elements of {name!r} share memory (`expand`), so it is not written")
        if owned is not None and _memory(tensor) not in owned:
            raise UsageError(
                f"`state_dict` of the model returns a copy of {name!r}, so writing it would not "
                "change the model; leave it out with `names`, or pass a dict of tensors to write"
            )


def _memory(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def renamed(
    target: Mapping[str, Tensor], names: Rename | None
) -> Iterator[tuple[str, str, Tensor]]:
    """Return the name, the published name and the tensor of each tensor that is written."""
    for name, tensor in target.items():
        published = published_name(name, names)
        if published is not None:
            yield name, published, tensor


def pairs(
    layout: Layout, target: Mapping[str, Tensor], names: Rename | None
) -> Iterator[tuple[Tensor, Entry]]:
    """Return each tensor of `target` with the entry that it gets.

    `names` has the published name of each name of the target, or is a function that returns it; a
    name that it does not have, or for which it returns None, is not written. None: the same names,
    and all of them must have been published.
    """
    for name, published, tensor in renamed(target, names):
        entry = layout.entries.get(published)
        if entry is None:
            raise UsageError(
                f"the published weights have no tensor {published!r} for {name!r} of the model; "
                "pass `names` to rename tensors or to leave some out"
            )
        if tuple(tensor.shape) != entry.shape:
            raise UsageError(
                f"{name!r} has the shape {tuple(tensor.shape)}, and the published tensor "
                f"{published!r} has {entry.shape}"
            )
        if tensor.is_meta or entry.offset < 0:
            continue
        yield tensor, entry


def _width(name: str, tensor: Tensor) -> int:
    """Return the bytes of what is compared as one integer: complex numbers are two of them."""
    _require_dense(name, tensor, "published")
    return _width_of(tensor.dtype)


def _require_dense(name: str, tensor: Tensor, use: str) -> None:
    kind = "quantized" if tensor.is_quantized else str(tensor.layout)
    kind = "nested" if tensor.is_nested else kind
    if kind != str(torch.strided):
        raise UsageError(f"{name!r} is a {kind} tensor; only dense tensors can be {use}")


def _width_of(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _identity(tensor: Tensor) -> object:
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    place = tensor.data_ptr(), tensor.device, tensor.dtype
    return *place, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""`ShardOptimizer`: an ordinary `torch.optim` optimizer over the range of one server.

An optimizer that works element by element runs on *blocks* of the flat memory, one after the other,
each with an optimizer of its own. The mean of the gradients of a block is still in the cache when
the block is updated, so a step reads and writes main memory once. Other optimizers get the
parameters one by one, in their shapes.

A parameter that no trainer has a gradient for is left alone with its state, as in torch. Where
blocks are used, a block must then consist of such parameters only, or of none: `_separate` splits
the blocks.

State: that of the optimizers, and `_blocks`. Used by one thread at a time: the shard holds its
lock.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from telegrad.errors import UsageError
from telegrad.param_groups import Options
from telegrad.ps.layout import DtypeRange, ParameterPart, ServerRange
from telegrad.ps.optimizer_types import State

MakeOptimizer = Callable[[list[dict[str, Any]]], optim.Optimizer]

# bytes: small enough that a few blocks fit into the shared cache, large enough that the overhead
# of Python per block is small
_BLOCK = 8 << 20
_HALF = {torch.float16, torch.bfloat16}  # summed as float32
_FUSED = {torch.float32, torch.float64}


class _ShardParameter(NamedTuple):
    """A parameter of an optimizer, and the place of its gradient in flat memory."""

    parameter: nn.Parameter
    start: int
    stop: int
    slots: frozenset[int]  # indices of the model's parameters that it consists of

    def gradient(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.parameter.dtype).view(self.parameter.shape)


class _OptimizerUnit(NamedTuple):
    """An optimizer, its parameters, the indices of its groups, and buffers for mean gradients."""

    optimizer: optim.Optimizer
    targets: list[_ShardParameter]
    groups: list[int]
    means: list[Tensor]


class ShardOptimizer:
    """Update the values of one range in place.

    `make_optimizer` creates an optimizer for parameter groups. `by_element`: update block by block.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        groups: Sequence[Options],
        server_range: ServerRange,
        values: Tensor,
        by_element: bool,
    ) -> None:
        self._make_optimizer = make_optimizer
        self._server_range = server_range
        self._by_element = by_element
        self._groups = [dict(group) for group in groups]
        self._values = values
        self._mean_buffers: dict[torch.dtype, Tensor] = {}
        self._blocks: list[tuple[DtypeRange, list[_OptimizerUnit]]] = []
        if by_element:
            self._set_blocks(
                [
                    (dtype_range, self._block_units(dtype_range))
                    for dtype_range in server_range.dtype_ranges
                ]
            )
        else:
            self._units = self._whole_units()
        step = inspect.signature(self._units[0].optimizer.step).parameters
        if "closure" in step and step["closure"].default is inspect.Parameter.empty:
            kind = type(self._units[0].optimizer).__name__
            raise UsageError(
                f"{kind} evaluates the model several times in a step, which a server cannot do; "
                "choose another optimizer"
            )

    def __repr__(self) -> str:
        kind = type(self._units[0].optimizer).__name__
        return f"<ShardOptimizer: {kind} over {len(self._units)} blocks>"

    def _set_blocks(self, blocks: list[tuple[DtypeRange, list[_OptimizerUnit]]]) -> None:
        self._blocks = blocks
        self._units = [unit for _, units in blocks for unit in units]

    def _block_units(self, dtype_range: DtypeRange) -> list[_OptimizerUnit]:
        size = _BLOCK if self._values.is_cpu else dtype_range.nbytes
        buffer = self._mean_buffer(dtype_range.dtype, size)
        slots = frozenset(part.slot.index for part in dtype_range.parts)
        units = []
        for start in range(dtype_range.offset, dtype_range.offset + dtype_range.nbytes, size):
            stop = min(start + size, dtype_range.offset + dtype_range.nbytes)
            target = _ShardParameter(
                nn.Parameter(self._values[start:stop].view(dtype_range.dtype)), start, stop, slots
            )
            options = {
                **self._groups[dtype_range.group],
                **self._fused_option(dtype_range.group, dtype_range.dtype),
            }
            optimizer = self._make_optimizer([{**options, "params": [target.parameter]}])
            units.append(
                _OptimizerUnit(
                    optimizer, [target], [dtype_range.group], [buffer[: target.parameter.numel()]]
                )
            )
        return units

    def _mean_buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return a buffer for a mean gradient. All blocks of a dtype share one."""
        buffer = self._mean_buffers.get(dtype)
        if buffer is None or buffer.numel() * dtype.itemsize < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._values.device).view(dtype)
            self._mean_buffers[dtype] = buffer
        return buffer

    def _fused_option(self, group: int, dtype: torch.dtype) -> Options:
        return _fused_option(self._groups[group], dtype) if self._values.is_cpu else {}

    def _whole_units(self) -> list[_OptimizerUnit]:
        targets: list[_ShardParameter] = []
        groups: list[dict[str, Any]] = []
        group_indices: list[int] = []
        for dtype_range in self._server_range.dtype_ranges:
            parameters = [
                nn.Parameter(part.of(self._values).view(part.slot.shape))
                for part in dtype_range.parts
            ]
            for each, part in zip(parameters, dtype_range.parts, strict=True):
                slots = frozenset([part.slot.index])
                targets.append(_ShardParameter(each, part.offset, part.offset + part.nbytes, slots))
            groups.append({**self._groups[dtype_range.group], "params": parameters})
            group_indices.append(dtype_range.group)
        means = [torch.empty_like(target.parameter) for target in targets]
        return [_OptimizerUnit(self._make_optimizer(groups), targets, group_indices, means)]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], missing: AbstractSet[int] = frozenset()) -> None:
        """Make one step with the mean of these gradients.

        Each is flat memory with the layout of the values. The parameters with the numbers in
        `missing` have no gradient.
        """
        if missing and self._by_element:
            self._separate(missing)
        for optimizer, targets, _, means in self._units:
            for target, mean in zip(targets, means, strict=True):
                if not target.slots <= missing:
                    target.parameter.grad = _mean(
                        [target.gradient(flat) for flat in gradients], mean
                    )
            optimizer.step()
            for target in targets:
                target.parameter.grad = None

    def _separate(self, missing: AbstractSet[int]) -> None:
        """Split dtype ranges so that either all parts of a range are missing, or none."""
        blocks: list[tuple[DtypeRange, list[_OptimizerUnit]]] = []
        for dtype_range, units in self._blocks:
            pieces = _split_dtype_range(
                dtype_range, [part.slot.index in missing for part in dtype_range.parts]
            )
            if len(pieces) < 2:
                blocks.append((dtype_range, units))
                continue
            whole = _joined_state(units)
            for piece in pieces:
                blocks.append((piece, self._block_units(piece)))
                self._load_dtype_range(
                    *blocks[-1], [_part_state(dtype_range, part, whole) for part in piece.parts]
                )
        self._set_blocks(blocks)

    def change(self, changes: dict[int, Options]) -> None:
        """Update the options of parameter groups, by the index of the group."""
        if not changes:
            return
        for index, changed in changes.items():
            self._groups[index].update(changed)
        for unit in self._units:
            for index, group in zip(unit.groups, unit.optimizer.param_groups, strict=True):
                group.update(changes.get(index, {}))
                if self._by_element:
                    group.update(self._fused_option(index, unit.targets[0].parameter.dtype))

    def options(self) -> list[Options]:
        """Return the current options of each group."""
        return [dict(group) for group in self._groups]

    # The state of the optimizer, by parts of the range

    def state(self) -> list[State]:
        """Return copies of the state of each part. With blocks, state per element is flat."""
        if not self._by_element:
            (unit,) = self._units
            return [
                _copied_state(unit.optimizer.state[target.parameter]) for target in unit.targets
            ]
        states = []
        for dtype_range, units in self._blocks:
            whole = _joined_state(units)
            states += [_part_state(dtype_range, part, whole) for part in dtype_range.parts]
        return states

    def load(self, states: Sequence[State]) -> None:
        """Set the state of each part, as `state` or `part_state` returned it."""
        if not self._by_element:
            (unit,) = self._units
            for index, (target, state) in enumerate(zip(unit.targets, states, strict=True)):
                unit.optimizer.state[target.parameter] = _placed_state(state, unit, index)
            return
        remaining = iter(states)
        blocks = []
        for dtype_range in self._server_range.dtype_ranges:
            mine = {part: next(remaining) for part in dtype_range.parts}
            by_element = self._keys_by_element(dtype_range.group, dtype_range.dtype)
            for piece in _split_dtype_range(
                dtype_range, [_shared_state(state, by_element) for state in mine.values()]
            ):
                blocks.append((piece, self._block_units(piece)))
                self._load_dtype_range(*blocks[-1], [mine[part] for part in piece.parts])
        self._set_blocks(blocks)

    def part_state(self, part: ParameterPart, state: State) -> State:
        """Return the state of one part, given that of the whole parameter."""
        if not self._by_element:
            return state
        by_element = self._keys_by_element(part.slot.group, part.slot.dtype)
        cut = dict(state)
        for key in by_element:
            if torch.is_tensor(cut.get(key)):
                cut[key] = cut[key].reshape(-1)[part.first : part.last]
        return cut

    def _load_dtype_range(
        self, dtype_range: DtypeRange, units: list[_OptimizerUnit], states: list[State]
    ) -> None:
        """Set the state of new units. The states of the parts differ only in values per element."""
        if not any(states):
            return
        by_element = self._keys_by_element(dtype_range.group, dtype_range.dtype)
        whole: State = dict(states[0])
        flat = {key for key in by_element if torch.is_tensor(whole.get(key))}
        for key in flat:
            whole[key] = torch.zeros(
                dtype_range.nbytes // dtype_range.dtype.itemsize, dtype=whole[key].dtype
            )
            for part, state in zip(dtype_range.parts, states, strict=True):
                _elements(dtype_range, part, whole[key]).copy_(state[key].reshape(-1))
        start = 0
        for unit in units:
            parameter = unit.targets[0].parameter
            stop = start + parameter.numel()
            mine = {
                key: value[start:stop] if key in flat else value for key, value in whole.items()
            }
            unit.optimizer.state[parameter] = _placed_state(mine, unit, 0)
            start = stop

    def _keys_by_element(self, group: int, dtype: torch.dtype) -> set[str]:
        """Return the keys of state with a value per element, found by a step of a probe."""
        probe = nn.Parameter(torch.zeros(2, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        optimizer = self._make_optimizer([{**self._groups[group], "params": [probe]}])
        optimizer.step()
        return {
            key
            for key, value in optimizer.state[probe].items()
            if torch.is_tensor(value) and value.dim() == 1
        }


def _mean(gradients: list[Tensor], out: Tensor) -> Tensor:
    """Return the mean. Gradients are divided before they are summed, to avoid overflow."""
    if len(gradients) == 1:
        return gradients[0]
    weight = 1 / len(gradients)
    total = out if out.dtype not in _HALF else torch.empty_like(out, dtype=torch.float32)
    torch.mul(gradients[0], weight, out=total)
    for gradient in gradients[1:]:
        total.add_(gradient, alpha=weight)
    return total if total is out else out.copy_(total)


def _fused_option(options: Options, dtype: torch.dtype) -> Options:
    """Return `fused=True` if the optimizer supports it and the user left the choice open."""
    undecided = "fused" in options and options["fused"] is None and options.get("foreach") is None
    if undecided and dtype in _FUSED and not options.get("differentiable"):
        return {"fused": True}
    return {}


def _split_dtype_range(dtype_range: DtypeRange, keys: Sequence[Any]) -> list[DtypeRange]:
    """Split a dtype range between neighbouring parts that have different keys."""
    keyed = zip(keys, dtype_range.parts, strict=True)
    pieces = []
    for _, group in itertools.groupby(keyed, key=lambda pair: pair[0]):
        parts = tuple(part for _, part in group)
        start, stop = parts[0].offset, parts[-1].offset + parts[-1].nbytes
        pieces.append(DtypeRange(dtype_range.group, dtype_range.dtype, start, stop - start, parts))
    return pieces if len(pieces) > 1 else [dtype_range]


def _shared_state(state: State, by_element: set[str]) -> list[tuple[str, Any]]:
    """Return the entries of a state that all parts of one block must have in common."""
    shared: list[tuple[str, Any]] = []
    for key, value in sorted(state.items()):
        if not torch.is_tensor(value):
            shared.append((key, value))
        elif key in by_element:
            shared.append((key, None))
        else:
            shared.append((key, float(value)))
    return shared


def _joined_state(units: list[_OptimizerUnit]) -> State:
    """Return the state of a dtype range, given the units of its blocks."""
    states = [unit.optimizer.state[unit.targets[0].parameter] for unit in units]
    flat = {key for key, value in states[0].items() if torch.is_tensor(value) and value.dim() == 1}
    joined = dict(states[0])
    for key in flat:
        joined[key] = torch.cat([state[key] for state in states])
    return joined


def _part_state(dtype_range: DtypeRange, part: ParameterPart, whole: State) -> State:
    """Return a copy of the state of one part, given that of its dtype range."""
    state = dict(whole)
    for key, value in whole.items():
        if torch.is_tensor(value) and value.dim() == 1:
            state[key] = _elements(dtype_range, part, value)
    return _copied_state(state)


def _elements(dtype_range: DtypeRange, part: ParameterPart, flat: Tensor) -> Tensor:
    """Return the elements of a part, given a tensor with one value per element of the range."""
    return flat[part.slice_in(dtype_range)]


def _placed_state(state: State, unit: _OptimizerUnit, index: int) -> State:
    """Return a copy of a state on the devices that torch's optimizers expect.

    These are the device of the parameter and, for the step counter, the CPU, unless the optimizer
    is fused or capturable.
    """
    device = unit.targets[index].parameter.device
    groups = unit.optimizer.param_groups
    counter_on_device = any(group.get("fused") or group.get("capturable") for group in groups)
    placed = dict(state)
    for key, value in state.items():
        if torch.is_tensor(value):
            on_device = key != "step" or counter_on_device
            placed[key] = value.to(device if on_device else "cpu", copy=True)
    return placed


def _copied_state(state: State) -> State:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}

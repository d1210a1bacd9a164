"""`ShardOptimizer`: an ordinary `torch.optim` optimizer over the range of one server.

An optimizer that works element by element is run on *blocks* of the flat memory, one after the other, each with an
optimizer of its own: the mean of the gradients of a block is still in the cache when the block is updated, so a step
reads and writes main memory once. Other optimizers see the parameters one by one, in their shapes.

A parameter that nobody has a gradient for is left alone with its state, as torch does it. In a block that is a matter
of where blocks end: parts that have been left alone and others get blocks of their own, from then on.

State: the optimizers' own, and `_blocks`. A solver is used by one thread at a time; its shard sees to that.
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
from telegrad.ps.layout import DtypeRun, ParameterPart, ServerRange

Options = dict[str, Any]
Make = Callable[[list[dict[str, Any]]], optim.Optimizer]
State = dict[str, Any]

# bytes: a few of them fit into the cache that cores share, and few enough make Python's part small
_BLOCK = 8 << 20
_BY_ELEMENT = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
_HALF = {torch.float16, torch.bfloat16}  # added up as float32
_FUSED = {torch.float32, torch.float64}


def works_by_element(optimizer: Any) -> bool:
    """Is the result for an element independent of all others? Known for torch's own; assumed of nobody else."""
    return optimizer in _BY_ELEMENT


class _ShardParameter(NamedTuple):
    """A parameter that an optimizer updates, and where its gradient lies in the memory of a trainer."""

    parameter: nn.Parameter
    start: int
    stop: int
    slots: frozenset[int]  # the numbers of what it consists of in the model

    def gradient(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.parameter.dtype).view(self.parameter.shape)


class _OptimizerUnit(NamedTuple):
    """An optimizer, its parameters, the numbers of its groups, and memory for their mean gradients."""

    optimizer: optim.Optimizer
    targets: list[_ShardParameter]
    groups: list[int]
    means: list[Tensor]


class ShardOptimizer:
    def __init__(
        self,
        make: Make,
        groups: Sequence[Options],
        share: ServerRange,
        values: Tensor,
        by_element: bool,
    ) -> None:
        self._make = make
        self._share = share
        self._by_element = by_element
        self._groups = [dict(group) for group in groups]
        self._values = values
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._blocks: list[tuple[DtypeRun, list[_OptimizerUnit]]] = []
        if by_element:
            self._arrange([(run, self._block_units(run)) for run in share.runs])
        else:
            self._units = self._whole_units()
        step = inspect.signature(self._units[0].optimizer.step).parameters
        if "closure" in step and step["closure"].default is inspect.Parameter.empty:
            kind = type(self._units[0].optimizer).__name__
            raise UsageError(
                f"{kind} evaluates the model again and again while it steps, which a server cannot do"
            )

    def __repr__(self) -> str:
        return f"<ShardOptimizer: {type(self._units[0].optimizer).__name__} over {len(self._units)} blocks>"

    def _arrange(self, blocks: list[tuple[DtypeRun, list[_OptimizerUnit]]]) -> None:
        self._blocks = blocks
        self._units = [unit for _, units in blocks for unit in units]

    def _block_units(self, run: DtypeRun) -> list[_OptimizerUnit]:
        size = _BLOCK if self._values.is_cpu else run.nbytes
        room = self._room(run.dtype, size)
        slots = frozenset(part.slot.number for part in run.parts)
        units = []
        for start in range(run.offset, run.offset + run.nbytes, size):
            stop = min(start + size, run.offset + run.nbytes)
            target = _ShardParameter(
                nn.Parameter(self._values[start:stop].view(run.dtype)), start, stop, slots
            )
            options = {**self._groups[run.group], **self._fastest(run.group, run.dtype)}
            optimizer = self._make([{**options, "params": [target.parameter]}])
            units.append(
                _OptimizerUnit(optimizer, [target], [run.group], [room[: target.parameter.numel()]])
            )
        return units

    def _room(self, dtype: torch.dtype, size: int) -> Tensor:
        """Memory for a mean, which all blocks of a dtype share."""
        known = self._scratch.get(dtype)
        if known is None or known.numel() * dtype.itemsize < size:
            known = torch.empty(size, dtype=torch.uint8, device=self._values.device).view(dtype)
            self._scratch[dtype] = known
        return known

    def _fastest(self, group: int, dtype: torch.dtype) -> Options:
        return _fastest(self._groups[group], dtype) if self._values.is_cpu else {}

    def _whole_units(self) -> list[_OptimizerUnit]:
        targets: list[_ShardParameter] = []
        groups: list[dict[str, Any]] = []
        numbers: list[int] = []
        for run in self._share.runs:
            parameters = [
                nn.Parameter(part.of(self._values).view(part.slot.shape)) for part in run.parts
            ]
            for each, part in zip(parameters, run.parts, strict=True):
                slots = frozenset([part.slot.number])
                targets.append(_ShardParameter(each, part.offset, part.offset + part.nbytes, slots))
            groups.append({**self._groups[run.group], "params": parameters})
            numbers.append(run.group)
        means = [torch.empty_like(target.parameter) for target in targets]
        return [_OptimizerUnit(self._make(groups), targets, numbers, means)]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], missing: AbstractSet[int] = frozenset()) -> None:
        """One step with the mean of these gradients, each in flat memory like that of the values.

        Parameters whose numbers are `missing` have none.
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
        """See to it that of each run, all or none is missing."""
        blocks: list[tuple[DtypeRun, list[_OptimizerUnit]]] = []
        for run, units in self._blocks:
            pieces = _pieces(run, [part.slot.number in missing for part in run.parts])
            if len(pieces) < 2:
                blocks.append((run, units))
                continue
            whole = _join(units)
            for piece in pieces:
                blocks.append((piece, self._block_units(piece)))
                self._load_run(*blocks[-1], [_slice(run, part, whole) for part in piece.parts])
        self._arrange(blocks)

    def change(self, changes: dict[int, Options]) -> None:
        """Options of groups that are new."""
        if not changes:
            return
        for number, changed in changes.items():
            self._groups[number].update(changed)
        for unit in self._units:
            for number, group in zip(unit.groups, unit.optimizer.param_groups, strict=True):
                group.update(changes.get(number, {}))
                if self._by_element:
                    group.update(self._fastest(number, unit.targets[0].parameter.dtype))

    def options(self) -> list[Options]:
        """The options of each group, as they are now."""
        return [dict(group) for group in self._groups]

    # The state of the optimizer, part by part

    def state(self) -> list[State]:
        """The state of each part of the share: copies. What belongs to elements is flat if the solver is."""
        if not self._by_element:
            (unit,) = self._units
            return [_copied(unit.optimizer.state[target.parameter]) for target in unit.targets]
        return [
            _slice(run, part, whole)
            for run, units in self._blocks
            for whole in [_join(units)]
            for part in run.parts
        ]

    def load(self, states: Sequence[State]) -> None:
        """Take the state of each part, as `state` or `cut` returned it."""
        if not self._by_element:
            (unit,) = self._units
            for number, (target, state) in enumerate(zip(unit.targets, states, strict=True)):
                unit.optimizer.state[target.parameter] = _placed(state, unit, number)
            return
        remaining = iter(states)
        blocks = []
        for run in self._share.runs:
            mine = {part: next(remaining) for part in run.parts}
            by_element = self._keys_by_element(run.group, run.dtype)
            for piece in _pieces(run, [_common(state, by_element) for state in mine.values()]):
                blocks.append((piece, self._block_units(piece)))
                self._load_run(*blocks[-1], [mine[part] for part in piece.parts])
        self._arrange(blocks)

    def cut(self, part: ParameterPart, state: State) -> State:
        """What of a whole parameter's state belongs to one part of it."""
        if not self._by_element:
            return state
        by_element = self._keys_by_element(part.slot.group, part.slot.dtype)
        return {
            key: value.reshape(-1)[part.first : part.last]
            if key in by_element and torch.is_tensor(value)
            else value
            for key, value in state.items()
        }

    def _load_run(self, run: DtypeRun, units: list[_OptimizerUnit], states: list[State]) -> None:
        """Give new units the states of their parts, which differ only in what belongs to elements."""
        if not any(states):
            return
        by_element = self._keys_by_element(run.group, run.dtype)
        whole: State = dict(states[0])
        flat = {key for key in by_element if torch.is_tensor(whole.get(key))}
        for key in flat:
            whole[key] = torch.zeros(run.nbytes // run.dtype.itemsize, dtype=whole[key].dtype)
            for part, state in zip(run.parts, states, strict=True):
                _elements(run, part, whole[key]).copy_(state[key].reshape(-1))
        start = 0
        for unit in units:
            parameter = unit.targets[0].parameter
            stop = start + parameter.numel()
            mine = {
                key: value[start:stop] if key in flat else value for key, value in whole.items()
            }
            unit.optimizer.state[parameter] = _placed(mine, unit, 0)
            start = stop

    def _keys_by_element(self, group: int, dtype: torch.dtype) -> set[str]:
        """Which entries of the state have a value for each element: seen on a small parameter."""
        probe = nn.Parameter(torch.zeros(2, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        optimizer = self._make([{**self._groups[group], "params": [probe]}])
        optimizer.step()
        return {
            key
            for key, value in optimizer.state[probe].items()
            if torch.is_tensor(value) and value.dim() == 1
        }


def _mean(gradients: list[Tensor], out: Tensor) -> Tensor:
    """Return the mean, which is finite if the gradients are: each is divided before they are added up."""
    if len(gradients) == 1:
        return gradients[0]
    share = 1 / len(gradients)
    total = out if out.dtype not in _HALF else torch.empty_like(out, dtype=torch.float32)
    torch.mul(gradients[0], share, out=total)
    for gradient in gradients[1:]:
        total.add_(gradient, alpha=share)
    return total if total is out else out.copy_(total)


def _fastest(options: Options, dtype: torch.dtype) -> Options:
    """Where the user has left open how a step is computed: in one pass, if the optimizer offers that."""
    open_to_all = "fused" in options and options["fused"] is None and options.get("foreach") is None
    return (
        {"fused": True}
        if open_to_all and dtype in _FUSED and not options.get("differentiable")
        else {}
    )


def _pieces(run: DtypeRun, keys: Sequence[Any]) -> list[DtypeRun]:
    """The run, divided where the keys of its parts change."""
    keyed = list(zip(keys, run.parts, strict=True))
    found = [
        [part for _, part in parts]
        for _, parts in itertools.groupby(keyed, key=lambda entry: entry[0])
    ]
    if len(found) < 2:
        return [run]
    return [
        DtypeRun(
            run.group,
            run.dtype,
            parts[0].offset,
            parts[-1].offset + parts[-1].nbytes - parts[0].offset,
            tuple(parts),
        )
        for parts in found
    ]


def _common(state: State, by_element: set[str]) -> list[tuple[str, Any]]:
    """What of a state parts must agree on to be in one block."""
    return [
        (
            key,
            None
            if key in by_element and torch.is_tensor(value)
            else float(value)
            if torch.is_tensor(value)
            else value,
        )
        for key, value in sorted(state.items())
    ]


def _join(units: list[_OptimizerUnit]) -> State:
    """The state of a run from that of its blocks."""
    states = [unit.optimizer.state[unit.targets[0].parameter] for unit in units]
    flat = {key for key, value in states[0].items() if torch.is_tensor(value) and value.dim() == 1}
    return {
        key: torch.cat([state[key] for state in states]) if key in flat else states[0][key]
        for key in states[0]
    }


def _slice(run: DtypeRun, part: ParameterPart, whole: State) -> State:
    return _copied(
        {
            key: _elements(run, part, value)
            if torch.is_tensor(value) and value.dim() == 1
            else value
            for key, value in whole.items()
        }
    )


def _elements(run: DtypeRun, part: ParameterPart, flat: Tensor) -> Tensor:
    """The elements of a part in something that has one value per element of the run."""
    return flat[part.within(run)]


def _placed(state: State, unit: _OptimizerUnit, number: int) -> State:
    """A copy of a state where an optimizer expects it: with the parameter, but counters of steps stay on the CPU."""
    parameter = unit.targets[number].parameter
    together = any(
        group.get("fused") or group.get("capturable") for group in unit.optimizer.param_groups
    )
    return {
        key: value.to(parameter.device if key != "step" or together else "cpu", copy=True)
        if torch.is_tensor(value)
        else value
        for key, value in state.items()
    }


def _copied(state: State) -> State:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}

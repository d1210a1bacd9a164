"""Random programs for autograd: their parts, and their generator.

A program is a tree of blocks. A block runs on one worker, computes with tensors there, and calls
blocks on other workers. `running` runs the same program on many workers and in one process, and
compares the results.

All values are 3 x 3, or tables of 5 x 3 for embeddings, so that all can be combined. Operations in
place are used only where torch allows them: on values that no operation has saved for its backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The parts of a program. `ins` and `outs` are indices of values within a block.


class Compute(NamedTuple):
    op: str
    ins: list[int]
    outs: list[int]


class Leaf(NamedTuple):
    """Use a leaf of this worker."""

    name: str
    out: int


class Hook(NamedTuple):
    kind: str
    value: int
    name: str


class StoreValue(NamedTuple):
    """Store a value on this worker, for blocks that run there later."""

    value: int
    name: str


class LoadValue(NamedTuple):
    name: str
    out: int


class Call(NamedTuple):
    how: str
    to: str
    via: str
    block: Block
    ins: list[int]
    refs: list[int]
    outs: list[int]


class ConcurrentCalls(NamedTuple):
    """Calls that run at the same time."""

    calls: list[Call]


class CreateReference(NamedTuple):
    """Create values on a worker and keep a reference to them; `ref` is its index."""

    to: str
    block: Block
    ins: list[int]
    ref: int


class FetchReference(NamedTuple):
    """Fetch the values of a reference."""

    ref: int
    outs: list[int]


Step = (
    Compute
    | Leaf
    | Hook
    | StoreValue
    | LoadValue
    | Call
    | ConcurrentCalls
    | CreateReference
    | FetchReference
)


@dataclass
class Block:
    steps: list[Step] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    raises: bool = False


class Roots(NamedTuple):
    """The roots of one backward pass.

    They are values of the main block, or values stored on a worker, where the pass then starts.
    """

    worker: str
    values: list[int]
    names: list[str]


@dataclass
class Program:
    seed: int
    leaves: dict[str, tuple[str, str, str]]  # name to worker, kind and hook
    main: Block
    passes: list[Roots]


# Operations


class Pair(torch.autograd.Function):
    """A function with two outputs and saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x - 2 * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        of_product, of_difference = gradients
        return of_product * y + of_difference, of_product * x - 2 * of_difference


class Stop(torch.autograd.Function):
    """A function whose backward returns None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def _top(x: Tensor) -> tuple[Tensor, Tensor]:
    """A function of whose outputs only one is differentiable."""
    values, places = x.topk(3, dim=1)
    return values, places.double() / 3


def _scale_row(x: Tensor) -> Tensor:
    x[0].mul_(0.5)
    return x


class Operation(NamedTuple):
    run: Callable[..., Any]
    ins: int
    outs: int = 1
    saves: bool = True  # does it save its inputs or its output?
    is_view: bool = False


_ROWS = torch.tensor([0, 3, 3])

OPERATIONS = {
    "constant": Operation(lambda: torch.arange(9, dtype=torch.double).view(3, 3) / 9, 0),
    "add": Operation(lambda x, y: x + y, 2, saves=False),
    "multiply": Operation(lambda x, y: x * y, 2),
    "matmul": Operation(lambda x, y: 0.4 * (x @ y), 2),
    "sin": Operation(lambda x: x.sin(), 1),
    "tanh": Operation(lambda x: x.tanh(), 1),
    "transpose": Operation(lambda x: x.t(), 1, saves=False, is_view=True),
    "rows": Operation(lambda x, y: torch.cat([x[:1], y[1:]]), 2, saves=False),
    "columns": Operation(lambda x: x[:, [2, 0, 0]], 1, saves=False),
    "diagonal": Operation(lambda x: x + x.diagonal(), 1, saves=False),
    "positive": Operation(lambda x: x * (x.detach() > 0), 1),
    "detach": Operation(lambda x: x.detach() * 1.0, 1),
    "pair": Operation(Pair.apply, 2, 2),
    "stop": Operation(Stop.apply, 1),
    "unbind": Operation(lambda x, y: torch.stack([x, y]).unbind(0), 2, 2),
    "top": Operation(_top, 1, 2),
}
IN_PLACE = {
    "multiply_": Operation(lambda x: x.mul_(0.9), 1, saves=False),
    "scale_row_": Operation(_scale_row, 1, saves=False),
    "tanh_": Operation(lambda x: x.tanh_(), 1),
    "add_": Operation(lambda x, y: x.add_(y), 2, saves=False),
}
ON_TABLES = {
    "embed": Operation(lambda table: torch.nn.functional.embedding(_ROWS, table, sparse=True), 1),
    "first_rows": Operation(lambda table: table[:3], 1),
}
ALL_OPERATIONS = {**OPERATIONS, **IN_PLACE, **ON_TABLES}

# None: the gradient of an output that is not used
HOOKS: dict[str, Callable[[Tensor | None], Tensor | None]] = {
    "double": lambda gradient: None if gradient is None else gradient * 2,
    "clamp": lambda gradient: None if gradient is None else gradient.clamp(-0.5, 0.5),
}


# The generator


class _Memory:
    """The memory that views share, and whether an operation has saved it."""

    def __init__(self, writable: bool) -> None:
        self.writable = writable


class _Value:
    """One tensor, in all blocks that use it."""

    def __init__(
        self, kind: str = "square", memory: _Memory | None = None, writable: bool = True
    ) -> None:
        self.kind = kind
        self.memory = memory or _Memory(writable)


class _Reference(NamedTuple):
    owner: str
    values: list[_Value]


class _BlockBuilder:
    """A block that is being generated: its worker, and its values by index."""

    def __init__(self, worker: str, depth: int, shares_memory: bool) -> None:
        self.worker = worker
        self.depth = depth
        # False if other blocks run at the same time, so that it must not use stored values.
        self.shares_memory = shares_memory
        self.block = Block()
        self.values: list[_Value] = []
        self.refs: list[_Reference] = []

    def number(self, value: _Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def of_kind(self, kind: str) -> list[int]:
        return [number for number, value in enumerate(self.values) if value.kind == kind]


class ProgramGenerator:
    """Generates one program."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._workers = [f"w{rank}" for rank in range(random.randint(2, 5))]
        self._leaves: dict[str, tuple[str, str, str]] = {}
        self._values: dict[str, _Value] = {}  # of leaves
        self._kept: dict[str, tuple[str, _Value]] = {}
        self._names = _numbered()
        for worker in self._workers:
            for _ in range(random.randint(1, 3)):
                kind = random.choice(["plain", "plain", "parameter", "frozen", "table"])
                hook = random.choice(["", "", "", "double", "clamp"]) if kind != "table" else ""
                self._leaves[f"{worker} {next(self._names)}"] = worker, kind, hook

    def write(self) -> Program:
        builder = _BlockBuilder("w0", 0, shares_memory=True)
        self._fill(builder, self._random.randint(3, 9))
        self._compute(builder, "add")
        passes = [self._roots(builder) for _ in range(self._random.choice([1, 1, 2, 3]))]
        return Program(self._random.randrange(1 << 30), self._leaves, builder.block, passes)

    def _roots(self, builder: _BlockBuilder) -> Roots:
        there = self._random.choice(self._workers)
        names = [
            name
            for name, (worker, value) in self._kept.items()
            if worker == there and value.kind == "square"
        ]
        if names and self._random.random() < 0.3:
            return Roots(there, [], self._some(names, 2))
        squares = builder.of_kind("square")
        return Roots("w0", [squares[-1], *self._some(squares, 2)], [])

    def _fill(self, builder: _BlockBuilder, length: int) -> None:
        self._leaf(builder)
        actions: list[Callable[[_BlockBuilder], None]] = [
            self._leaf,
            self._compute,
            self._compute,
            self._in_place,
            self._hook,
        ]
        if builder.shares_memory:
            actions += [self._keep, self._recall]
        if builder.depth < 3:
            actions += [self._call, self._call, self._together, self._make, self._here]
        if builder.depth < 2:
            actions.append(self._recurrence)
        for _ in range(length):
            self._random.choice(actions)(builder)

    def _leaf(self, builder: _BlockBuilder) -> None:
        mine = [name for name, (worker, _, _) in self._leaves.items() if worker == builder.worker]
        name = self._random.choice(mine)
        kind = "table" if self._leaves[name][1] == "table" else "square"
        value = self._values.setdefault(name, _Value(kind, writable=False))
        builder.block.steps.append(Leaf(name, builder.number(value)))

    def _compute(self, builder: _BlockBuilder, op: str = "") -> None:
        tables = builder.of_kind("table")
        if not op and tables and self._random.random() < 0.3:
            op, table = self._random.choice(list(ON_TABLES)), self._random.choice(tables)
            builder.block.steps.append(
                Compute(op, [table], [builder.number(_Value(writable=False))])
            )
            return
        squares = builder.of_kind("square")
        op = op or self._random.choice(list(OPERATIONS))
        operation = OPERATIONS[op]
        if operation.ins and not squares:
            op, operation = "constant", OPERATIONS["constant"]
        ins = [self._random.choice(squares) for _ in range(operation.ins)]
        if operation.saves:
            for number in ins:
                builder.values[number].memory.writable = False
        outs = []
        for _ in range(operation.outs):
            memory = builder.values[ins[0]].memory if operation.is_view else None
            outs.append(builder.number(_Value(memory=memory, writable=not operation.saves)))
        builder.block.steps.append(Compute(op, ins, outs))

    def _in_place(self, builder: _BlockBuilder) -> None:
        squares = builder.of_kind("square")
        writable = [number for number in squares if builder.values[number].memory.writable]
        if not writable:
            return
        target = self._random.choice(writable)
        memory = builder.values[target].memory
        op = self._random.choice(list(IN_PLACE))
        others = [number for number in squares if builder.values[number].memory is not memory]
        if op == "add_" and not others:
            return
        ins = [target, self._random.choice(others)] if op == "add_" else [target]
        memory.writable = not IN_PLACE[op].saves
        builder.block.steps.append(Compute(op, ins, [target]))

    def _hook(self, builder: _BlockBuilder) -> None:
        squares = builder.of_kind("square")
        if squares:
            kind = self._random.choice([*HOOKS, "look"])
            builder.block.steps.append(
                Hook(kind, self._random.choice(squares), f"hook {next(self._names)}")
            )

    def _keep(self, builder: _BlockBuilder) -> None:
        number = self._random.randrange(len(builder.values))
        name = f"{builder.worker} kept {next(self._names)}"
        self._kept[name] = builder.worker, builder.values[number]
        builder.block.steps.append(StoreValue(number, name))

    def _recall(self, builder: _BlockBuilder) -> None:
        names = [name for name, (worker, _) in self._kept.items() if worker == builder.worker]
        if names:
            name = self._random.choice(names)
            builder.block.steps.append(LoadValue(name, builder.number(self._kept[name][1])))

    def _call(self, builder: _BlockBuilder) -> None:
        ins = self._arguments(builder)
        builder.block.steps.append(self._a_call(builder, ins, builder.shares_memory, builder.refs))

    def _recurrence(self, builder: _BlockBuilder) -> None:
        """Add a chain of calls, each with a result of the call before, and a sum of all."""
        squares = builder.of_kind("square")
        if not squares:
            return
        total = state = self._random.choice(squares)
        for _ in range(self._random.randint(2, 5)):
            call = self._a_call(builder, [state, *self._some(squares, 1)], False, [])
            builder.block.steps.append(call)
            if call.outs:
                state = call.outs[0]
                ins, total = [total, state], builder.number(_Value())
                builder.block.steps.append(Compute("add", ins, [total]))

    def _together(self, builder: _BlockBuilder) -> None:
        arguments = [self._arguments(builder) for _ in range(self._random.randint(2, 3))]
        calls = [self._a_call(builder, ins, False, []) for ins in arguments]
        builder.block.steps.append(ConcurrentCalls(calls))

    def _a_call(
        self, builder: _BlockBuilder, ins: list[int], shares_memory: bool, refs: list[_Reference]
    ) -> Call:
        how = self._random.choice(["call", "call", "submit", "then", "relay"])
        to, via = self._random.choice(self._workers), self._random.choice(self._workers)
        given = self._some(list(range(len(refs))), 2)
        inner = _BlockBuilder(to, builder.depth + 1, shares_memory)
        inner.refs = [refs[number] for number in given]
        raises = self._random.random() < 0.1
        outs = self._body(builder, inner, ins, raises)
        if how in ("then", "relay"):
            outs = [_Value() for _ in outs]
        numbers = [] if raises else [builder.number(value) for value in outs]
        return Call(how, to, via, inner.block, ins, given, numbers)

    def _make(self, builder: _BlockBuilder) -> None:
        to, ins = self._random.choice(self._workers), self._arguments(builder)
        inner = _BlockBuilder(to, 3, shares_memory=False)
        self._body(builder, inner, ins, raises=False)
        made = [inner.values[number] for number in inner.block.results]
        for value in made:
            # On its owner, a reference gives these tensors themselves and not copies.
            value.memory.writable = False
        builder.refs.append(_Reference(to, made))
        builder.block.steps.append(CreateReference(to, inner.block, ins, len(builder.refs) - 1))

    def _here(self, builder: _BlockBuilder) -> None:
        if builder.refs:
            number = self._random.randrange(len(builder.refs))
            reference = builder.refs[number]
            values = (
                reference.values if reference.owner == builder.worker else _copies(reference.values)
            )
            builder.block.steps.append(
                FetchReference(number, [builder.number(value) for value in values])
            )

    def _arguments(self, builder: _BlockBuilder) -> list[int]:
        return [
            self._random.randrange(len(builder.values)) for _ in range(self._random.randint(0, 3))
        ]

    def _body(
        self, outer: _BlockBuilder, inner: _BlockBuilder, ins: list[int], raises: bool
    ) -> list[_Value]:
        """Generate the block of a call, and return its results as values of the caller."""
        inner.values = _copies([outer.values[number] for number in ins])
        self._fill(inner, self._random.randint(1, 5))
        self._compute(inner, "constant" if not inner.of_kind("square") else "")
        squares = inner.of_kind("square")
        inner.block.results = self._random.choices(squares, k=self._random.randint(0, 3))
        inner.block.raises = raises
        return _copies([inner.values[number] for number in inner.block.results])

    def _some(self, things: list[Any], at_most: int) -> list[Any]:
        return self._random.sample(things, min(len(things), self._random.randint(0, at_most)))


def _copies(values: list[_Value]) -> list[_Value]:
    """Return the values that the receiver of a message gets: one new tensor for each value."""
    copies = {id(value): _Value(value.kind) for value in values}
    return [copies[id(value)] for value in values]


def _numbered() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def random_program(random: Random) -> Program:
    return ProgramGenerator(random).write()

"""Run the programs of `programs` on many workers and in one process, and compare the results.

Both ways use the same interpreter of blocks. Tensors get from one worker to another through calls,
or in one process as clones, one per message. All state of one run is in a `RunState`, which called
functions find by its number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import autograd, current_agent
from telegrad.agent import Agent
from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster
from tests.autograd.programs import (
    ALL_OPERATIONS,
    HOOKS,
    Block,
    Call,
    Compute,
    ConcurrentCalls,
    CreateReference,
    FetchReference,
    Hook,
    Leaf,
    LoadValue,
    Program,
    Roots,
    StoreValue,
)

PATIENCE = 20.0

_run_states: dict[int, RunState] = {}
_numbers = itertools.count()


class BlockRaised(RuntimeError):
    """The error of a block that the program wants to fail."""


@dataclass
class RunState:
    """The leaves and stored tensors of all workers of one run, and what hooks saw."""

    leaves: dict[str, Tensor]
    # Of the leaves: torch can deadlock if several threads use a leaf for the first time.
    uses: list[Tensor]
    kept: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, list[Tensor | None]] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    def see(self, name: str, gradient: Tensor | None) -> None:
        self.seen.setdefault(name, []).append(None if gradient is None else gradient.clone())


@dataclass
class RunOutcome:
    """The results of a run. They must be equal in both ways of running a program."""

    values: list[Tensor]
    gradients: dict[str, Tensor]
    seen: dict[str, list[Tensor | None]]


class Runner(Protocol):
    """How a block calls other workers. `refs` are results of `make`."""

    def call(self, step: Call, ins: Sequence[Tensor], refs: list[Any]) -> list[Tensor]: ...
    def together(self, steps: list[Call], ins: list[list[Tensor]]) -> list[list[Tensor]]: ...
    def make(self, step: CreateReference, ins: Sequence[Tensor]) -> Any: ...
    def here(self, ref: Any) -> list[Tensor]: ...


def run_block(
    block: Block, run_state: RunState, runner: Runner, ins: Sequence[Tensor], refs: list[Any]
) -> list[Tensor]:
    """Run one block, and return all its values."""
    values: dict[int, Tensor] = dict(enumerate(ins))
    refs = list(refs)
    for step in block.steps:
        match step:
            case Compute():
                made = ALL_OPERATIONS[step.op].run(*(values[number] for number in step.ins))
                values.update(
                    zip(step.outs, [made] if isinstance(made, Tensor) else made, strict=True)
                )
            case Leaf():
                values[step.out] = run_state.leaves[step.name]
            case Hook():
                _add_hook(step, values[step.value], run_state)
            case StoreValue():
                run_state.kept[step.name] = values[step.value]
            case LoadValue():
                values[step.out] = run_state.kept[step.name]
            case Call():
                given = [refs[number] for number in step.refs]
                values.update(
                    _answer(step, runner.call(step, [values[number] for number in step.ins], given))
                )
            case ConcurrentCalls():
                arguments = [[values[number] for number in call.ins] for call in step.calls]
                for call, answer in zip(
                    step.calls, runner.together(step.calls, arguments), strict=True
                ):
                    values.update(_answer(call, answer))
            case CreateReference():
                refs.append(runner.make(step, [values[number] for number in step.ins]))
            case FetchReference():
                values.update(zip(step.outs, runner.here(refs[step.ref]), strict=True))
    if block.raises:
        raise BlockRaised
    return [values[number] for number in sorted(values)]


def results_of(block: Block, values: list[Tensor]) -> list[Tensor]:
    return [values[number] for number in block.results]


def _answer(step: Call, answer: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    return zip(step.outs, answer, strict=True)


def _add_hook(step: Hook, value: Tensor, run_state: RunState) -> None:
    if not value.requires_grad or value.is_leaf:
        return  # leaves have their hooks already; each use would add another
    if step.kind in HOOKS:
        value.register_hook(HOOKS[step.kind])
    else:
        value.register_hook(lambda gradient: run_state.see(step.name, gradient))


def halved(values: list[Tensor]) -> list[Tensor]:
    return [value * 0.5 for value in values]


def new_world(program: Program) -> RunState:
    random = Random(program.seed)
    leaves = {}
    for name, (_, kind, hook) in program.leaves.items():
        shape = (5, 3) if kind == "table" else (3, 3)
        data = torch.tensor(
            [random.uniform(-1, 1) for _ in range(shape[0] * 3)], dtype=torch.double
        ).view(shape)
        leaf = nn.Parameter(data) if kind == "parameter" else data.requires_grad_(kind != "frozen")
        if hook and leaf.requires_grad:
            leaf.register_hook(HOOKS[hook])
        leaves[name] = leaf
    return RunState(leaves, [leaf.view_as(leaf) for leaf in leaves.values()])


def loss_of(value: Tensor) -> Tensor:
    return (value * torch.arange(1, 1 + value.numel(), dtype=torch.double).view_as(value)).sum() / 9


def losses_of(values: Sequence[Tensor]) -> list[Tensor]:
    return [loss_of(value) for value in values if value.requires_grad]


# In one process


@dataclass
class LocalReference:
    owner: str
    values: list[Tensor]


class Alone:
    """One worker of a run in one process."""

    def __init__(self, worker: str, run_state: RunState) -> None:
        self._worker = worker
        self._run_state = run_state

    def call(self, step: Call, ins: Sequence[Tensor], refs: list[Any]) -> list[Tensor]:
        if step.how == "relay":
            ins = _cross(ins)
        try:
            values = run_block(
                step.block, self._run_state, Alone(step.to, self._run_state), _cross(ins), refs
            )
        except BlockRaised:
            return []
        answer = _cross(results_of(step.block, values))
        if step.how == "relay":
            answer = _cross(halved(answer))
        return halved(answer) if step.how == "then" else answer

    def together(self, steps: list[Call], ins: list[list[Tensor]]) -> list[list[Tensor]]:
        return [self.call(step, arguments, []) for step, arguments in zip(steps, ins, strict=True)]

    def make(self, step: CreateReference, ins: Sequence[Tensor]) -> LocalReference:
        values = run_block(
            step.block, self._run_state, Alone(step.to, self._run_state), _cross(ins), []
        )
        return LocalReference(step.to, results_of(step.block, values))

    def here(self, ref: LocalReference) -> list[Tensor]:
        return ref.values if ref.owner == self._worker else _cross(ref.values)


def _cross(values: Sequence[Tensor]) -> list[Tensor]:
    """Return copies as a message creates them: one for each tensor."""
    copies = {id(value): _copy(value) for value in values}
    return [copies[id(value)] for value in values]


class _CopiedParameter(torch.autograd.Function):
    """Return a copy that is a `Parameter` but no view.

    Hooks on a view are lost when it is changed in place.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # an undefined gradient stays undefined
        copy: Tensor = torch.Tensor._make_subclass(nn.Parameter, value.detach().clone())
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        return gradients[0]


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        copy: Tensor = _CopiedParameter.apply(value)  # type: ignore[no-untyped-call]
        return copy
    return value.clone()


def run_alone(program: Program) -> RunOutcome:
    run_state = new_world(program)
    values = run_block(program.main, run_state, Alone("w0", run_state), [], [])
    for number, roots in enumerate(program.passes, 1):
        losses = losses_of(
            [values[number] for number in roots.values]
            + [run_state.kept[name] for name in roots.names]
        )
        if losses:
            torch.autograd.backward(losses, retain_graph=number < len(program.passes))
    gradients = {
        name: leaf.grad for name, leaf in run_state.leaves.items() if leaf.grad is not None
    }
    return _outcome(run_state, values, gradients)


# With many workers


class Worker:
    """One worker of a distributed run."""

    def __init__(self, agent: Agent, run_state: RunState) -> None:
        self._agent = agent
        self._run_state = run_state

    def call(self, step: Call, ins: Sequence[Tensor], refs: list[Any]) -> list[Tensor]:
        arguments = (self._run_state.number, step.block, list(ins), refs)
        try:
            if step.how == "call":
                return self._agent.call(step.to, serve, *arguments)
            return self._start(step, arguments).wait()
        except BlockRaised:
            return []

    def together(self, steps: list[Call], ins: list[list[Tensor]]) -> list[list[Tensor]]:
        futures = [
            self._start(step, (self._run_state.number, step.block, arguments, []))
            for step, arguments in zip(steps, ins, strict=True)
        ]
        return [_answer_of(future) for future in futures]

    def make(self, step: CreateReference, ins: Sequence[Tensor]) -> RRef[list[Tensor]]:
        return remote(
            step.to, serve, (self._run_state.number, step.block, list(ins), []), agent=self._agent
        )

    def here(self, ref: RRef[list[Tensor]]) -> list[Tensor]:
        return ref.to_here()

    def _start(self, step: Call, arguments: tuple[Any, ...]) -> Future[list[Tensor]]:
        if step.how == "relay":
            return self._agent.submit(step.via, relay, step.to, *arguments)
        future = self._agent.submit(step.to, serve, *arguments)
        return future.then(lambda done: halved(done.wait())) if step.how == "then" else future


def _answer_of(future: Future[list[Tensor]]) -> list[Tensor]:
    error = future.exception(PATIENCE)
    if error is None:
        return future.wait()
    if not isinstance(error, BlockRaised):
        raise error
    return []


def here() -> Agent:
    agent = current_agent()
    assert agent is not None
    return agent


def serve(number: int, block: Block, ins: list[Tensor], refs: list[Any]) -> list[Tensor]:
    """Run a block on the worker that was called."""
    run_state = _run_states[number]
    return results_of(block, run_block(block, run_state, Worker(here(), run_state), ins, refs))


@rpc.functions.async_execution
def relay(to: str, number: int, block: Block, ins: list[Tensor], refs: list[Any]) -> Any:
    """Run a block on another worker, and return its results when they are there."""
    return here().submit(to, serve, number, block, ins, refs).then(lambda done: halved(done.wait()))


def serve_backward(context_id: int, number: int, names: list[str], retain_graph: bool) -> None:
    losses = losses_of([_run_states[number].kept[name] for name in names])
    if losses:
        autograd.backward(context_id, losses, retain_graph)


def gradients_here(context_id: int, number: int) -> dict[str, Tensor]:
    """Return the gradients on this worker, by the name of the leaf."""
    try:
        found = autograd.get_gradients(context_id)
    except UsageError:
        return {}  # no call under the context reached this worker
    names = {id(leaf): name for name, leaf in _run_states[number].leaves.items()}
    return {
        names.get(id(leaf), f"a stray leaf on {here().name}"): gradient
        for leaf, gradient in found.items()
    }


@contextmanager
def registered(run_state: RunState) -> Iterator[RunState]:
    _run_states[run_state.number] = run_state
    try:
        yield run_state
    finally:
        del _run_states[run_state.number]


def run_distributed(program: Program, cluster: LocalCluster) -> RunOutcome:
    w0 = cluster["w0"]
    with registered(new_world(program)) as run_state, autograd.context(agent=w0) as context_id:
        values = run_block(program.main, run_state, Worker(w0, run_state), [], [])
        for number, roots in enumerate(program.passes, 1):
            _backward(w0, context_id, run_state, roots, values, number < len(program.passes))
        gradients: dict[str, Tensor] = {}
        for agent in cluster:
            gradients.update(w0.call(agent.name, gradients_here, context_id, run_state.number))
        return _outcome(run_state, values, gradients)


def _backward(
    agent: Agent,
    context_id: int,
    run_state: RunState,
    roots: Roots,
    values: list[Tensor],
    retain_graph: bool,
) -> None:
    if roots.names:
        agent.call(
            roots.worker, serve_backward, context_id, run_state.number, roots.names, retain_graph
        )
        return
    losses = losses_of([values[number] for number in roots.values])
    if losses:
        autograd.backward(context_id, losses, retain_graph)


# Comparing


def _outcome(run_state: RunState, values: list[Tensor], gradients: dict[str, Tensor]) -> RunOutcome:
    return RunOutcome(values, gradients, run_state.seen)


def assert_same(distributed: RunOutcome, alone: RunOutcome) -> None:
    assert [value.requires_grad for value in distributed.values] == [
        value.requires_grad for value in alone.values
    ]
    for value, expected in zip(distributed.values, alone.values, strict=True):
        torch.testing.assert_close(value, expected)
    assert_same_tensors(distributed.gradients, alone.gradients)
    assert set(distributed.seen) == set(alone.seen)
    for name, gradients in distributed.seen.items():
        assert_same_tensors(dict(enumerate(gradients)), dict(enumerate(alone.seen[name])))


def assert_same_tensors(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        if expected[name] is None or tensor is None:
            assert expected[name] is tensor, name
        else:
            torch.testing.assert_close(
                _coalesced(tensor),
                _coalesced(expected[name]),
                rtol=1e-9,
                atol=1e-11,
                msg=partial("{}: {}".format, name),
            )


def _coalesced(tensor: Tensor) -> Tensor:
    """Return a tensor whose values have a defined order if it is sparse."""
    return tensor.coalesce() if tensor.is_sparse else tensor

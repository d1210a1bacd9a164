"""`Attachment`: a trainer's side of one server.

State: `version`, what of this server's range the model holds; `_memory`, where the server publishes its values, and
`_shares`, whether it reads gradients where they are. Used by the thread that steps the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telegrad.futures import Future
from telegrad.ps import segments, service
from telegrad.ps.flat import Flat
from telegrad.ps.segments import Mapping
from telegrad.ps.shard import Answer, Plan, Welcome
from telegrad.ps.solver import Options, State

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


class Attachment:
    def __init__(self, agent: Agent, server: str, plan: Plan, flat: Flat) -> None:
        self.server = server
        self.plan = plan
        self.version = 0
        self._agent = agent
        self._flat = flat
        self._me = agent.me.incarnation
        self._memory: Mapping | None = None
        self._shares = False

    def __repr__(self) -> str:
        how = "shared memory" if self._memory is not None and self._shares else "calls"
        return f"<Attachment to {self.server!r}: {self.plan.share.nbytes} bytes, version {self.version}, by {how}>"

    # Coming and going

    def create(self) -> None:
        """Make the shard there, with the values of this model."""
        share = self.plan.share
        self._agent.invoke(self.server, service.create, (self.plan, self._flat.values[share.start : share.stop]))

    def announce(self) -> int:
        return int(self._agent.invoke(self.server, service.announce, (self.plan, self._me)))

    def enter(self, first: int) -> Future[Welcome]:
        segment = self._flat.segment
        handle = None if segment is None else segment.handle
        return self._start(service.enter, self.plan.name, self._me, first, handle)

    def entered(self, welcome: Welcome) -> None:
        self._shares = welcome.shared
        memory = welcome.memory if self._flat.segment is not None else None
        self._memory = None if memory is None else segments.find(memory)
        self.take(welcome.answer)

    def leave(self) -> Future[None]:
        return self._start(service.leave, self.plan.name, self._me)

    # Steps

    def push(self, step: int, changes: dict[int, Options]) -> Answer:
        """Report the gradients that are in the flat memory and wait for the answer."""
        answer: Answer = self._agent.invoke(self.server, service.push, self._pushed(step, changes), None, None)
        return answer

    def start_push(self, step: int, changes: dict[int, Options]) -> Future[Answer]:
        return self._start(service.push, *self._pushed(step, changes))

    def _pushed(self, step: int, changes: dict[int, Options]) -> tuple[Any, ...]:
        share = self.plan.share
        gradients = None if self._shares else self._flat.gradients[share.start : share.stop]
        return self.plan.name, self._me, step, self.version, changes, gradients, self._memory is None

    def take(self, answer: Answer) -> None:
        """Copy what the server answered into the flat memory."""
        share = self.plan.share
        if answer.values is not None:
            self._flat.take(share.start, answer.values)
        elif not self._read(answer.version):
            answer = self._agent.invoke(self.server, service.pull, (self.plan.name,))
            assert answer.values is not None
            self._flat.take(share.start, answer.values)
        self.version = answer.version

    def _read(self, version: int) -> bool:
        """Copy a published version. False if the server began to write over it meanwhile."""
        assert self._memory is not None
        nbytes = self.plan.share.nbytes
        places = self._memory.contents.numel() // nbytes
        start = version % places * nbytes
        self._flat.take(self.plan.share.start, self._memory.contents[start : start + nbytes])
        return self._memory.counter < version + places

    # The optimizer's state

    def state(self) -> Future[list[State]]:
        return self._start(service.state, self.plan.name)

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> Future[None]:
        return self._start(service.load, self.plan.name, states, changes)

    def _start(self, function: Any, *args: Any) -> Future[Any]:
        return self._agent.start(self.server, function, args, None, None)

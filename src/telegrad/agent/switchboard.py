"""`Switchboard`: one thread for all lanes whose calls are answered later.

A call that waits for others (in a batch, for a round, for a future) leaves the thread of its lane with nothing to do
but to read the next one. With many such lanes, every call would wake a thread that then fights the others for the
interpreter. So these lanes are read by one thread, which takes all calls that have arrived before it sleeps again. It
hands the reading over if a call blocks (`ReadLoop`); a lane that brings any other kind of call gets its own thread back
first.

State, under `_lock`: `_lanes` by file number, `_epoll`, which they are registered with, and `_loop`, which reads them;
both are None while there are none. `_first` is a lane that would share a thread if there were another. `_ready` (what
the last look found), `_alarms` and `_alone` belong to the reader. What it reads are jobs: calls, and alarms that are
due.
"""

from __future__ import annotations

import functools
import select
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from telegrad.agent.clock import Clock
from telegrad.agent.reading import ReadLoop
from telegrad.agent.threads import Threads
from telegrad.errors import ProtocolError
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Frame

Job = Callable[[], None]

_COMPANY = 16  # calls that a lane brings while no other is here, until it gets its thread back


class Lane(Protocol):
    """What a switchboard needs of a connection."""

    channel: Channel

    def serve_lane(self, given: list[Frame] | None = None) -> None: ...
    def serve_here(self, frame: Frame) -> bool: ...
    def ended(self, error: BaseException) -> None: ...


class Switchboard:
    """Reads the lanes of one agent whose calls are answered later."""

    def __init__(self, threads: Threads, clock: Clock) -> None:
        self._threads = threads
        self._clock = clock
        self._lanes: dict[int, Lane] = {}
        self._epoll: select.epoll | None = None
        self._loop: ReadLoop[Job] | None = None
        self._first: int | None = None
        self._ready: list[int] = []
        self._alarms: dict[Hashable, tuple[float, Job]] = {}
        self._alone = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Switchboard of {len(self._lanes)} lanes>"

    def take(self, lane: Lane) -> bool:
        """Read this lane from now on; its thread must not any more. False: it is better read alone."""
        number = lane.channel.fileno()
        if number is None or number < 0 or lane.channel.has_frame():
            return False
        with self._lock:
            if not self._lanes and self._first in (None, number):
                self._first = number
                return False  # a lane that is alone is best read by its own thread
            if self._epoll is None:
                self._epoll = select.epoll()
            if self._loop is None:
                loop = ReadLoop(self, _run, _ended, self._threads, self._clock)
                try:
                    loop.start()  # it looks at the lanes when this lock is free
                except RuntimeError:
                    return False  # the system refuses a thread
                self._loop = loop
            self._epoll.register(number, select.EPOLLIN)
            self._lanes[number] = lane
        return True

    def drop(self) -> None:
        """After a fork, in the child: the lanes are the parent's."""
        if self._epoll is not None:
            self._epoll.close()

    # What a loop reads (see `Source`)

    def recv(self) -> Job:
        while True:
            while self._ready:
                number = self._ready.pop()
                lane = self._lanes.get(number)
                if lane is None:
                    continue
                try:
                    frame = lane.channel.poll()
                except (ChannelClosed, ProtocolError) as error:
                    self._end(number, lane, error)
                    continue
                if frame is not None:
                    return functools.partial(self._serve, number, lane, frame)
            if self._alarms:
                job = self._due()
                if job is not None:
                    return job
            self._look()

    def has_frame(self) -> bool:
        return bool(self._ready)

    def flush(self) -> None:
        return

    def at(self, key: Hashable, moment: float, job: Job) -> bool:
        self._alarms[key] = moment, job
        return True

    def shut(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.channel.shut()

    # Inside

    def _look(self) -> None:
        """Wait until some lanes have something to read; `ChannelClosed` if there are none left."""
        with self._lock:
            epoll = self._epoll
            if not self._lanes or epoll is None:
                if epoll is not None:
                    epoll.close()
                self._epoll = self._loop = None
                alarms, self._alarms = self._alarms, {}
                for moment, job in alarms.values():
                    self._clock.at(moment, functools.partial(self._threads.start_when_possible, job, self._clock))
                raise ChannelClosed("no lanes are left")
        until = min((moment for moment, _ in self._alarms.values()), default=None)
        self._ready = [
            number for number, _ in epoll.poll(None if until is None else max(until - time.monotonic(), 0.0))
        ]

    def _due(self) -> Job | None:
        """An alarm whose moment has come."""
        now = time.monotonic()
        for key, (moment, job) in self._alarms.items():
            if moment <= now:
                del self._alarms[key]
                return job
        return None

    def _serve(self, number: int, lane: Lane, frame: Frame) -> None:
        try:
            served = lane.serve_here(frame)
        except ProtocolError as error:
            self._end(number, lane, error)
            return
        self._alone = 0 if len(self._lanes) > 1 else self._alone + 1
        if not served:
            self._return(number, lane, frame)
        elif self._alone >= _COMPANY:
            self._alone, self._first = 0, number
            self._return(number, lane, None)

    def _return(self, number: int, lane: Lane, frame: Frame | None) -> None:
        """Give a lane a thread of its own again."""
        given = [] if frame is None else [frame]
        if self._remove(number):
            self._threads.start_when_possible(functools.partial(lane.serve_lane, given), self._clock)

    def _end(self, number: int, lane: Lane, error: Exception) -> None:
        if self._remove(number):
            lane.ended(error)

    def _remove(self, number: int) -> bool:
        with self._lock:
            if self._lanes.pop(number, None) is None:
                return False  # whoever took it out does the rest
            if self._epoll is not None:
                self._epoll.unregister(number)
            return True


def _ended(error: BaseException) -> None:
    return  # the last lane left, and with it the loop; the next one starts another


def _run(job: Job) -> None:
    job()

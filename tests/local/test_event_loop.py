"""One thread reads all connections of an agent, and nobody waits for a call that blocks."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from telegrad import Future, batched, thread_roles
from telegrad.agent import Agent
from telegrad.errors import ProtocolError
from telegrad.messages.remote_functions import DeferredReply
from telegrad.rpc.functions import async_execution
from telegrad.runtime import active_runtime
from telegrad.scheduling.event_loop import _FRAMES_PER_READ, _SMALL_FRAME, EventLoop
from telegrad.scheduling.event_loops import EventLoops
from telegrad.scheduling.poller import LoopConnection
from telegrad.server import connection
from telegrad.spinning import spinning
from telegrad.testing import LocalCluster
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.stream import StreamChannel
from telegrad.wire.frames import Frame, Kind, encode_header
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Shared, hold_at, until

ROUNDS = 20
CALLERS = ("w1", "w2", "w3")


class Rounds(Shared):
    """Answers its callers when all of them are there, and notes which threads brought them."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self._parties = parties
        self._here: list[Future[int]] = []
        self._lock = threading.Lock()

    def arrive(self) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            self.threads.add(threading.get_ident())
            self._here.append(future)
            full, here = len(self._here) == self._parties, self._here
            if full:
                self._here = []
        if full:
            for number, each in enumerate(here):
                each.set_result(number)
        return future


@async_execution
def meet(rounds: Rounds) -> Any:
    return rounds.arrive()


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(4, event_loops=1)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the clock leaves the loop to its leader, and no call seems slow.

    Only a call that waits then changes the thread. The clock may hand the loop over whenever the
    system keeps the leader from running, and measures the time of calls on the wall.
    """
    monkeypatch.setattr(EventLoop, "tick", lambda self: False)
    monkeypatch.setattr(connection, "_now", lambda: 0.0)


def identity() -> int:
    return threading.get_ident()


def ask_identity(of: str) -> tuple[int, int]:
    agent = active_runtime()
    assert agent is not None
    return identity(), agent.agent.call(of, identity)


def sleep_unknown(gate: Gate) -> int:
    """Block in a wait that Telegrad does not know of."""
    gate.hold()
    return identity()


@pytest.mark.usefixtures("undisturbed")
def test_one_thread_serves_all_callers(workers: LocalCluster) -> None:
    asynchronous = {workers[name].submit("w0", identity).wait() for name in CALLERS}
    synchronous = {workers[name].call("w0", identity) for name in CALLERS}
    assert len(asynchronous | synchronous) == 1
    assert sum(loop.hand_over_count for loop in workers["w0"]._runtime.event_loops) == 0


@pytest.mark.usefixtures("undisturbed")
def test_calls_that_are_answered_later_share_the_thread(
    workers: LocalCluster, in_background: Any
) -> None:
    rounds = Rounds(len(CALLERS))

    def play(agent: Agent) -> list[int]:
        return [agent.call("w0", meet, rounds) for _ in range(ROUNDS)]

    results = [
        each.result(PATIENCE) for each in [in_background(play, workers[name]) for name in CALLERS]
    ]
    assert [sorted(each) for each in zip(*results, strict=True)] == [[0, 1, 2]] * ROUNDS
    assert len(rounds.threads) == 1


@pytest.mark.usefixtures("undisturbed")
def test_a_call_that_waits_goes_on_where_it_was_and_another_thread_reads(
    workers: LocalCluster,
) -> None:
    here, there = workers["w1"].call("w0", ask_identity, "w2")
    assert here != there
    assert sum(loop.hand_over_count for loop in workers["w0"]._runtime.event_loops) == 1
    assert workers["w1"].call("w0", identity) != here  # that thread has left the loop


def ask_behind_gate(of: str, gate: Gate) -> int:
    """Make a nested call that is answered when the gate is open."""
    agent = active_runtime()
    assert agent is not None
    answer: int = agent.agent.call(of, sleep_unknown, gate)
    return answer


@pytest.mark.usefixtures("undisturbed")
def test_a_nested_call_whose_reply_comes_first_keeps_the_loop() -> None:
    with LocalCluster(3, transports=("unix",), event_loops=1) as workers:
        workers["w1"].call("w0", ask_identity, "w2")  # connect
        [loop] = workers["w0"]._runtime.event_loops
        until(lambda: loop._asleep)
        before = loop.hand_over_count
        here, _ = workers["w1"].call("w0", ask_identity, "w2")
        assert workers["w1"].call("w0", identity) == here
        assert loop.hand_over_count == before


@pytest.mark.usefixtures("undisturbed")
def test_a_nested_call_that_waits_does_not_hold_up_the_others(
    workers: LocalCluster, gate: Gate
) -> None:
    workers["w1"].call("w0", ask_identity, "w2")  # connect
    waiting = workers["w1"].submit("w0", ask_behind_gate, "w2", gate)
    gate.wait_for()
    assert workers["w3"].call("w0", abs, -1) == 1
    assert workers["w1"].submit("w0", abs, -2).result(PATIENCE) == 2
    gate.open()
    assert waiting.result(PATIENCE)
    assert workers["w0"]._runtime.functions.find(ask_behind_gate).seconds <= 0  # it only waited


@pytest.mark.usefixtures("undisturbed")
def test_a_nested_call_gives_the_loop_back_to_a_worker_that_calls_itself(
    workers: LocalCluster,
) -> None:
    # w0 must read the inner call to itself while its leader waits for the outer one.
    workers["w1"].call("w0", ask_identity, "w0")
    here, there = workers["w1"].call("w0", ask_identity, "w0")
    assert here != there


def test_a_call_whose_thread_loses_the_loop_before_the_call_begins_is_answered(
    workers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    w0 = workers["w0"]
    [loop] = w0._runtime.event_loops
    find = w0._runtime.functions.find

    def wait_and_find(function: Any) -> Any:
        thread_roles.resume(thread_roles.pause())
        until(lambda: loop._asleep)  # the new leader has nothing to send
        return find(function)

    monkeypatch.setattr(w0._runtime.functions, "find", wait_and_find)
    assert workers["w1"].submit("w0", abs, -1).result(PATIENCE) == 1
    assert workers["w1"].call("w0", abs, -2) == 2


def test_a_call_that_blocks_does_not_hold_up_the_others(
    workers: LocalCluster, gate: Gate, in_background: Callable[..., Any]
) -> None:
    held = [in_background(workers[name].call, "w0", sleep_unknown, gate) for name in CALLERS]
    gate.wait_for(len(CALLERS))
    assert workers["w1"].call("w0", abs, -1) == 1
    assert workers["w2"].submit("w0", abs, -2).result(PATIENCE) == 2
    gate.open()
    threads = {each.result(PATIENCE) for each in held}
    assert len(threads) == len(CALLERS)
    target = workers["w0"]._runtime.functions.find(sleep_unknown)
    assert target.seconds > 0  # it was seen to block: the executor runs it from now on


def test_a_peer_that_takes_no_answers_is_read_no_more_and_holds_up_nobody(
    cluster: Clusters, in_background: Any
) -> None:
    workers = cluster(3)
    w1 = workers["w1"]
    assert w1.submit("w0", bytes, 1).wait() == b"\0"
    (peer,) = w1._runtime.peers.all()
    asleep, awake = threading.Event(), threading.Event()

    def sleep(_: Any) -> None:
        asleep.set()
        awake.wait(PATIENCE)

    # w1 no longer reads: its leader is held in a callback, and the clock may not relieve it.
    for loop in w1._runtime.event_loops:
        w1._runtime.clock.remove_listener(loop)
    w1.submit("w0", abs, -1).add_done_callback(sleep)
    assert asleep.wait(PATIENCE)
    # in another thread: the calls block, too, once they are not read
    submitting = in_background(lambda: [w1.submit("w0", bytes, 1 << 13) for _ in range(4000)])
    server_connection = next(
        each
        for each in workers["w0"]._runtime.listener.connections
        if each.peer_name == "w1" and each.is_multiplexed
    )
    if server_connection.channel.kind != "memory":
        until(lambda: server_connection.watched_events == select.EPOLLOUT)
    assert workers["w2"].call("w0", abs, -2) == 2
    awake.set()
    futures = submitting.result(PATIENCE)
    assert all(len(future.result(PATIENCE)) == 1 << 13 for future in futures)
    assert not peer.lost


# The loop by itself


class Recorder(LoopConnection):
    """Notes the frames of a connection; `act` is what it does with one."""

    def __init__(self, channel: Any) -> None:
        super().__init__()
        self.channel = channel
        self.calls: list[Any] = []
        self.act: Callable[[Frame], None] = lambda _: None
        self.over = threading.Event()

    def handle(self, frame: Frame) -> None:
        self.calls.append(frame.call_id)
        self.act(frame)

    def on_ended(self, error: BaseException) -> None:
        self.channel.close()
        self.over.set()


class MakeLine(Protocol):
    """The fixture `line`."""

    def __call__(self, recorder: type[Recorder] = Recorder) -> Line: ...


class Line:
    """A recorder, and the other end of what it reads."""

    def __init__(self, loop: EventLoops, make: type[Recorder]) -> None:
        near, far = socket.socketpair()
        self.far = StreamChannel(far, BufferPool(), 1 << 30)
        self.recorder: Any = make(StreamChannel(near, BufferPool(), 1 << 30))
        self._loop = loop

    def add(self) -> None:
        self._loop.add(self.recorder)

    def send(self, *calls: int) -> None:
        for call in calls:
            self.far.cork(Kind.CALL, call, b"x")
        assert self.far.flush_nowait()


@pytest.fixture
def agent(cluster: Clusters) -> Agent:
    return cluster(1, event_loops=1)["w0"]


@pytest.fixture
def line(agent: Agent) -> Iterator[MakeLine]:
    lines: list[Line] = []

    def make(recorder: type[Recorder] = Recorder) -> Line:
        lines.append(Line(agent._runtime.event_loops, recorder))
        return lines[-1]

    yield make
    for each in lines:
        each.far.close()
        if agent._runtime.event_loops.is_reading(each.recorder):
            assert each.recorder.over.wait(PATIENCE)
        each.recorder.channel.close()


@pytest.mark.usefixtures("undisturbed")
def test_what_is_left_is_done_once_after_all_that_was_there(line: MakeLine) -> None:
    one, two = line(), line()
    done: list[Any] = []
    finished = threading.Event()

    def leave() -> None:
        done.append("left")
        finished.set()

    def act(frame: Frame) -> None:
        done.append(frame.call_id)
        if thread_roles.has_pending_messages():
            thread_roles.run_when_drained("key", leave)

    one.recorder.act = two.recorder.act = act
    one.send(1, 2, 3)
    one.add()
    assert finished.wait(PATIENCE)
    assert done == [1, 2, 3, "left"]


@pytest.mark.usefixtures("undisturbed")
def test_an_alarm_rings_on_the_thread_that_reads(line: MakeLine) -> None:
    one = line()
    rang: list[int] = []
    finished = threading.Event()

    def ring() -> None:
        rang.append(identity())
        finished.set()

    def act(_: Frame) -> None:
        rang.append(identity())
        assert thread_roles.run_at("key", time.monotonic() + 0.01, ring)

    one.recorder.act = act
    one.add()
    one.send(1)
    assert finished.wait(PATIENCE)
    assert rang[0] == rang[1]


@pytest.mark.usefixtures("undisturbed")
def test_one_connection_does_not_keep_the_others_waiting(line: MakeLine) -> None:
    one, two = line(), line()
    order: list[str] = []
    many = 4 * _FRAMES_PER_READ
    one.recorder.act = lambda _: order.append("one")
    two.recorder.act = lambda _: order.append("two")
    hold, go = line(), threading.Event()

    def wait(_: Frame) -> None:
        go.wait(PATIENCE)

    hold.recorder.act = wait  # nobody else reads meanwhile
    two.add()
    hold.add()
    one.add()
    hold.send(1)
    one.send(*range(many))
    two.send(1)
    go.set()
    until(lambda: len(order) == many + 1)
    assert order.index("two") <= many / 2


def test_a_large_frame_is_received_beside_the_loop(line: MakeLine, in_background: Any) -> None:
    one, two = line(), line()
    one.add()
    two.add()
    body = bytes(range(256)) * (1 << 15)
    bodies: list[bytes] = []
    one.recorder.act = lambda frame: bodies.append(bytes(frame.body))
    parts, total = body[: 1 << 20], len(body)
    one.far._sock.sendall(encode_header(Kind.CALL, 5, body))  # type: ignore[arg-type]
    one.far._sock.sendall(parts)
    two.send(7)
    until(lambda: two.recorder.calls == [7])  # the rest of the large one has not even been sent
    sending = in_background(one.far._sock.sendall, body[len(parts) : total])
    until(lambda: len(bodies) == 1)
    sending.result(PATIENCE)
    assert bodies == [body]
    one.send(6)
    until(lambda: one.recorder.calls == [5, 6])


def test_who_holds_up_its_own_connection_holds_up_no_other(line: MakeLine) -> None:
    one, two = line(), line()
    held, go = threading.Event(), threading.Event()

    def act(frame: Frame) -> None:
        if frame.call_id == 1:
            role = thread_roles.begin_backpressure()
            held.set()
            go.wait(PATIENCE)
            thread_roles.end_backpressure(role)

    one.recorder.act = act
    one.add()
    two.add()
    one.send(1, 2, 3)
    assert held.wait(PATIENCE)
    two.send(1)
    until(lambda: two.recorder.calls == [1])
    assert one.recorder.calls == [1]
    assert one.recorder.hold_count == 1
    go.set()
    until(lambda: one.recorder.calls == [1, 2, 3])


class Postponing(Recorder):
    """Leaves a part of every frame for later; `act_later` is what it does with one."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.act_later: Callable[[int], object] = lambda _: None

    def handle(self, frame: Frame) -> None:
        super().handle(frame)
        self.unfinished.append(frame.call_id)

    def finish(self) -> None:
        epoch = self.loop.own_epoch
        while self.unfinished and self.loop.epoch == epoch:
            call = self.unfinished.popleft()
            self.calls.append(f"later {call}")
            self.act_later(call)

    def on_ended(self, error: BaseException) -> None:
        self.calls.append("ended")
        super().on_ended(error)


@pytest.mark.usefixtures("undisturbed")
def test_what_frames_leave_for_later_is_done_when_all_that_are_here_were_handled(
    line: MakeLine,
) -> None:
    one = line(Postponing)
    one.send(1, 2, 3)
    one.add()
    until(lambda: len(one.recorder.calls) == 6)
    assert one.recorder.calls == [1, 2, 3, "later 1", "later 2", "later 3"]


def test_a_large_frame_lets_what_was_left_for_later_be_done_first(line: MakeLine) -> None:
    one = line(Postponing)
    one.far.cork(Kind.CALL, 1, b"x")
    one.far.cork(Kind.CALL, 2, bytes(_SMALL_FRAME + 1))
    one.far.cork(Kind.CALL, 3, b"x")
    one.far.cork(Kind.CALL, 4, b"x")
    assert one.far.flush_nowait()
    one.add()
    until(lambda: len(one.recorder.calls) == 8)
    assert one.recorder.calls == [
        *(1, 2, "later 1", "later 2"),
        *(3, 4, "later 3", "later 4"),
    ]


def test_who_blocks_in_what_was_left_for_later_does_not_hold_up_the_rest(
    line: MakeLine,
) -> None:
    one, meeting = line(Postponing), threading.Barrier(3)
    one.recorder.act_later = lambda _: meeting.wait(PATIENCE)
    one.send(1, 2, 3)
    one.add()
    until(lambda: len(one.recorder.calls) == 6)
    one.send(4)
    until(lambda: 4 in one.recorder.calls)
    meeting.abort()


@pytest.mark.parametrize("blocks", [False, True], ids=["", "blocks"])
def test_what_was_left_for_later_is_done_before_a_connection_ends(
    line: MakeLine, blocks: bool
) -> None:
    one, meeting = line(Postponing), threading.Barrier(2)

    def refuse(frame: Frame) -> None:
        if frame.call_id == 3:
            raise ProtocolError("no third frame")

    one.recorder.act = refuse
    if blocks:  # another thread leads when the second of them is done
        one.recorder.act_later = lambda _: meeting.wait(PATIENCE)
    one.send(1, 2, 3)
    one.add()
    assert one.recorder.over.wait(PATIENCE)
    assert one.recorder.calls == [1, 2, 3, "later 1", "later 2", "ended"]


class LateLock:
    """A lock that one thread takes late: `before` runs first, once."""

    def __init__(self, lock: Any, before: Callable[[], None]) -> None:
        self._lock, self._before = lock, [before]
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() == self._thread and self._before:
            self._before.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_late_tick_leaves_the_loop_to_who_handles_the_next_frame(
    agent: Agent, line: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, (loop,) = line(), agent._runtime.event_loops
    begun, may_end = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def act(frame: Frame) -> None:
        begun[frame.call_id].set()
        assert may_end[frame.call_id].wait(PATIENCE)

    def end_first_frame() -> None:
        may_end[0].set()
        assert begun[1].wait(PATIENCE)

    one.recorder.act = act
    one.add()
    agent._runtime.clock.remove_listener(loop)
    one.send(0, 1)
    assert begun[0].wait(PATIENCE)
    loop.tick()
    monkeypatch.setattr(loop, "_lock", LateLock(loop._lock, end_first_frame))
    loop.tick()
    assert loop.hand_over_count == 0
    may_end[1].set()


def test_an_unexpected_error_ends_its_connection_only(line: MakeLine, caplog: Any) -> None:
    one, two = line(), line()

    def fail(_: Frame) -> None:
        raise ZeroDivisionError

    one.recorder.act = fail
    one.add()
    two.add()
    one.send(1)
    assert one.recorder.over.wait(PATIENCE)
    two.send(1)
    until(lambda: two.recorder.calls == [1])
    assert "unexpected" in caplog.text


def test_nothing_is_read_after_the_end(cluster: Clusters, line: MakeLine) -> None:
    agent = cluster(1)["w0"]
    agent.close()
    with pytest.raises(ChannelClosed):
        agent._runtime.event_loops.add(line().recorder)


sizes: list[int] = []


@batched(max_size=4)
def count(numbers: list[int]) -> list[int]:
    sizes.append(len(numbers))
    return numbers


@pytest.mark.usefixtures("undisturbed")
def test_calls_that_arrive_together_run_together(line: MakeLine) -> None:
    sizes.clear()
    answers: list[int] = []

    def act(frame: Frame) -> None:
        outcome = count.batching.serve(False, frame.call_id)  # type: ignore[attr-defined]
        if type(outcome) is DeferredReply:
            outcome.listen(lambda done: answers.append(done.value()))
        else:
            answers.append(outcome)

    one = line()
    one.recorder.act = act
    one.send(*range(7))
    one.add()
    until(lambda: sorted(answers) == list(range(7)))
    assert sizes == [4, 3]


@pytest.mark.usefixtures("undisturbed")
def test_replies_to_earlier_calls_are_sent_before_a_nested_call_waits(
    line: MakeLine,
) -> None:
    one, failures = line(), list[BaseException]()
    finished = threading.Event()

    def act(frame: Frame) -> None:
        if frame.call_id == 1:
            one.recorder.channel.cork(Kind.REPLY, 1, b"x")
            return
        role = thread_roles.current_role()
        assert role is not None
        thread_roles.pause_when_needed(role)
        try:  # the peer of the nested call may wait for the reply
            assert one.far.recv(PATIENCE).call_id == 1
        except BaseException as error:
            failures.append(error)
        thread_roles.resume(role)
        finished.set()

    one.recorder.act = act
    one.send(1, 2)
    one.add()
    assert finished.wait(2 * PATIENCE)
    assert not failures


class RestAfterPause:
    """A `DelayedPause` that is never needed, and sends the rest of a reply once it is paused."""

    def __init__(self, sock: socket.socket, rest: bytes) -> None:
        self._sock, self._rest = sock, rest
        self._idle, self._other = socket.socketpair()

    def fileno(self) -> int:
        return self._idle.fileno()

    def pause(self) -> None:
        self._sock.sendall(self._rest)

    def close(self) -> None:
        self._idle.close()
        self._other.close()


def test_a_reply_that_arrives_in_parts_does_not_hold_up_the_loop() -> None:
    near, far = socket.socketpair()
    channel = StreamChannel(near, BufferPool(), 1 << 30)
    channel.cork(Kind.REPLY, 1, b"reply")
    reply = channel._queue.pop()
    far.sendall(reply[:-1])
    delayed = RestAfterPause(far, reply[-1:])
    assert channel.recv_or_pause(PATIENCE, delayed).call_id == 1
    delayed.close()
    channel.close()
    far.close()


def test_a_thread_of_the_user_has_nothing_more_to_read() -> None:
    assert not thread_roles.has_pending_messages()
    assert not thread_roles.run_at("key", 5.0, lambda: None)


def test_an_executor_that_is_full_holds_up_who_fills_it(
    cluster: Clusters, gate: Gate, in_background: Any
) -> None:
    workers = cluster(3, threads=1, max_threads=2)
    w0 = workers["w0"]
    target = w0._runtime.functions.find(hold_at)
    target.seconds = 1.0  # it is known to be slow
    futures = [workers["w1"].submit("w0", hold_at, gate) for _ in range(8)]
    until(
        lambda: any(
            server_connection.hold_count for server_connection in w0._runtime.listener.connections
        )
    )
    assert workers["w2"].call("w0", abs, -3) == 3
    gate.open()
    for future in futures:
        future.result(PATIENCE)
    until(
        lambda: (
            not any(
                server_connection.hold_count
                for server_connection in w0._runtime.listener.connections
            )
        )
    )


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads spin, however busy the machine is."""
    monkeypatch.setattr(spinning, "rest_until", 0.0)
    monkeypatch.setattr(spinning, "lost_core", lambda before, now: False)


@pytest.mark.usefixtures("no_rest")
def test_a_connection_that_must_not_be_read_is_not_looked_at_either(
    agent: Agent, line: MakeLine
) -> None:
    # nobody leads this loop but this test
    one, loop = line(), EventLoop(agent._runtime.threads, agent._runtime.clock)
    loop._last_read, loop._is_repeated = one.recorder, True
    one.send(1)
    one.recorder.watched_events = select.EPOLLOUT  # its peer takes no answers
    assert not loop._spin()
    assert not one.recorder.channel.has_frame()
    one.recorder.watched_events = select.EPOLLIN
    assert loop._spin()
    assert one.recorder.channel.has_frame()
    one.recorder.watched_events = 0
    loop.close()


@pytest.mark.usefixtures("no_rest")
def test_a_connection_that_is_always_readable_does_not_keep_the_others_waiting(
    agent: Agent, line: MakeLine
) -> None:
    # nobody leads this loop but this test
    one, two = line(), line()
    loop = EventLoop(agent._runtime.threads, agent._runtime.clock)
    two.recorder.loop = loop
    loop._connections.add(two.recorder)
    loop._update_epoll(two.recorder, two.recorder.channel.fileno() or -1, select.EPOLLIN)
    one.recorder.watched_events = select.EPOLLIN
    two.send(1)
    reads = 0
    while not loop._ready:
        reads += 1
        assert reads < 100_000
        one.send(reads)
        loop._last_read, loop._is_repeated = one.recorder, True
        loop._spin()
        while one.recorder.channel.next_frame() is not None:
            pass
    assert list(loop._ready) == [two.recorder]
    loop._remove(two.recorder)
    one.recorder.watched_events = 0
    loop.close()

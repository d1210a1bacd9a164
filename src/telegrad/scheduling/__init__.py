"""The threads of an agent: event loops, executor, thread pool and clock.

This package decides on which thread work runs. It does not know what a call is: frames are handled
by subclasses of `LoopConnection` (`server.connection`, `client.multiplexed`).

Where a served call runs. The thread that receives a call also runs it if possible, because handing
a message to another thread costs more than most calls do. The rules:

1. The *leader* of the event loop reads a frame, runs the call and queues the reply (`event_loop`).
   The replies to one peer are sent together once its frames are handled.
2. The leader is about to block in a wait that Telegrad knows of: `Future.wait`, a full socket, a
   large copy. It hands the loop over to another thread first (`thread_roles.pause`, `LeaderRole`).
   The old leader continues with its call, the new one with the next frame. In a nested synchronous
   call, it waits for the reply and for all connections, and hands the loop over only if something
   else arrives before the reply (`thread_roles.pause_when_needed`).
3. The leader blocks in an unknown wait, or computes for long: the clock finds it inside the same
  frame at two consecutive ticks and hands the loop over (`EventLoop.tick`).
4. A function that ran for more than `SLOW_SECONDS`, or that caused 3, is run by the executor from
   then on (`executor`; `server.connection` compares the measured time). So are callbacks of
   futures that did (`client.multiplexed`).
5. The executor runs up to a limit of calls at once. Calls in a known wait do not count. When no
   call finishes between two ticks, the limit doubles, so calls that wait for each other progress.
   If the calls compete for the interpreter lock and finish faster with a lower limit, the limit is
   lowered (`contention`).
6. When the queue of the executor is full, `Executor.submit` blocks, and the connection that
   delivers more such calls is not read until there is room (`thread_roles.begin_backpressure`). So
   the back-pressure reaches the caller.
7. The rest of a frame of more than 1 MiB is received by a thread of its own, so that the other
   connections of the loop are still read.
8. With an interpreter lock an agent has one event loop. Without it, an agent has several, and each
   connection belongs to one of them (`event_loops`).

Nothing of the user runs on the clock's thread (`clock`): it runs timers, deadlines and heartbeats.
"""

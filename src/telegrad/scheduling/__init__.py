"""The threads of an agent: event loop, executor, thread pool and clock. Nothing here knows what a call is."""

# Until all importers of `EventLoops` use its own module: `event_loop` must be imported before it.
from telegrad.scheduling import event_loop as event_loop

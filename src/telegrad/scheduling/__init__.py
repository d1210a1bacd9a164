"""The threads of an agent: event loop, executor, thread pool and clock. Nothing here knows what a call is."""

"""Names that moved to `thread_pool` and `executor`."""

from telegrad.scheduling.executor import SLOW, Executor
from telegrad.scheduling.thread_pool import Job, ThreadPool

__all__ = ["SLOW", "Executor", "Job", "ThreadPool"]

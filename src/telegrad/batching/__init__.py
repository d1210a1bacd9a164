"""Batched calls: run concurrent calls of one function as one call with stacked arguments.

`decorator` is the public entry point. A call that cannot run at once goes to a `queue`, whose
`scheduler` decides which calls run together and when; `execution` stacks their arguments (`calls`),
runs the function and splits its result. Code here runs only on the worker that serves
the function: nothing may depend on how the call was sent.
"""

from telegrad.batching.calls import Versioned
from telegrad.batching.decorator import Batching, batched
from telegrad.batching.metrics import Statistics, Times

__all__ = ["Batching", "Statistics", "Times", "Versioned", "batched"]

"""Weights from a trainer to many workers: versioned, equal to the bit, as deltas.

A `Publisher` makes versions of the weights of a model. A `Subscriber` in any other worker has the
newest version that has arrived and copies it into a model. Only what changed is sent, one worker of
each host receives it for all, and hosts pass it on to each other.

`deltas`, `integers` and `layout` code versions, `versions` stores them, `topology` decides who
sends to whom, `receiver` receives, and `service` has the remote functions. `staleness` drops what
was computed with old versions.
"""

from telegrad.batching import Versioned
from telegrad.weights.publisher import Publisher, PublishReport
from telegrad.weights.receiver import ReceiverCounters
from telegrad.weights.staleness import StalenessFilter
from telegrad.weights.subscriber import Subscriber

__all__ = [
    "PublishReport",
    "Publisher",
    "ReceiverCounters",
    "StalenessFilter",
    "Subscriber",
    "Versioned",
]

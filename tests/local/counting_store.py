"""A store that counts the requests of one worker."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_REQUESTS = ("add", "check", "compare_set", "get", "multi_get", "set")


class CountingStore(dist.HashStore):
    """Pass requests on to the store that all workers share, and count them."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._shared = store
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        if name in _REQUESTS:
            self.count += 1
            return getattr(self._shared, name)
        return super().__getattribute__(name)

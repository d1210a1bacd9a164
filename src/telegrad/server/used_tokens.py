"""`UsedTokens`: accept each admission token once.

State: `_nonces`, the newest last, under `_lock`.
"""

from __future__ import annotations

import threading

from telegrad.group.endpoint import LocalEndpoint
from telegrad.wire import admission_token

_MAX_NONCES = 1 << 14


class UsedTokens:
    """The admission tokens that were used at one agent."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        self._endpoint = endpoint
        self._nonces: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def accept(self, token: bytes) -> bool:
        """Return whether a token was made for this agent and was not used before."""
        for address in self._endpoint.addresses:
            nonce = admission_token.verified_nonce(self._endpoint.key, token, address)
            if nonce is not None:
                with self._lock:
                    is_new = nonce not in self._nonces
                    self._nonces[nonce] = None
                    if len(self._nonces) > _MAX_NONCES:
                        del self._nonces[next(iter(self._nonces))]
                return is_new
        return False

"""`SignedStore`: entries of a store that only workers with the group's secret can write.

The stores of `torch.distributed` have no authentication: whoever reaches one can write to it. So
each entry carries an HMAC under a key that is derived from the secret. It covers the id of the
group, the key of the entry, a number that grows with each change, and the value. An entry that was
forged, copied from another key or group, put back after a later one, or removed after this worker
has read it, is an error that names it. Nobody can hide from a worker that has just started that
there was a later entry; but an address in an old entry leads nowhere, because the worker that
listens there must prove in the handshake that it is this incarnation and knows the secret.

A store may be used from one thread at a time only while it waits, so it is never asked to wait.

State: `_seen` (the last entry read or written, by key) and all use of the store, under `_lock`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad.errors import JoinError, StoreTampered
from telegrad.group.store_connection import StoreConnection

Store = Any  # torch.distributed.Store; that name is missing in builds of torch without distributed

_SEPARATOR = "\0"


class StoreEntry(NamedTuple):
    """A number, and the text with the HMAC, a random part, this number and a value, as stored."""

    number: int
    text: str

    @property
    def value(self) -> str:
        """The value in the store."""
        return self.text.split(" ", 3)[3]


class SignedStore:
    """The signed entries of one group. `group` is "" until it is known."""

    def __init__(self, store: Store, key: bytes) -> None:
        self.group = ""
        self._store = store
        self._connection = StoreConnection(store)
        self._key = hmac.digest(key, b"telegrad directory", hashlib.sha256)
        self._seen: dict[str, StoreEntry] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<SignedStore of group {self.group!r}, {len(self._seen)} entries read>"

    def read(self, key: str, subject: str) -> StoreEntry | None:
        """Return an entry; None if it does not exist.

        Raise `StoreTampered`, which names `subject`, if it was not written by a worker of the
        group, or is older than one that was read before.
        """
        with self._lock:
            text = self._get(key)
            if text is not None:
                return self._verify(key, subject, text)
            if key in self._seen:
                raise _removed(key, subject)
            return None

    def read_all(self, subjects: Mapping[str, str]) -> list[StoreEntry] | None:
        """Return the entries with the keys of `subjects`; None if one does not exist.

        This takes two requests to the store, however many entries there are. Raise as `read` does.
        """
        with self._lock:
            keys = list(subjects)
            if not self._have(keys):
                return None
            try:
                found = self._store.multi_get(keys)
            except (RuntimeError, AttributeError) as error:  # as in `_get`
                raise _no_answer(error) from error
            return [
                self._verify(key, subjects[key], bytes(value).decode("utf-8", "replace"))
                for key, value in zip(keys, found, strict=True)
            ]

    def _verify(self, key: str, subject: str, text: str) -> StoreEntry:
        """Under the lock: return the entry of a text that was read. See `read`."""
        seen = self._seen.get(key)
        if seen is not None and seen.text == text:
            return seen
        entry = self._parse(key, text)
        if entry is None:
            raise _tampered(
                key,
                subject,
                "was changed by someone without the group's secret (or by a worker with "
                "another TELEGRAD_SECRET)",
            )
        if seen is not None and entry.number <= seen.number:
            raise _tampered(
                key,
                subject,
                f"was put back: it is number {entry.number}, and this worker has read number "
                f"{seen.number}",
            )
        self._seen[key] = entry
        return entry

    def last_seen(self, key: str) -> StoreEntry | None:
        """Return the entry that was read or written last, without reading the store."""
        return self._seen.get(key)

    def write(self, key: str, value: str, previous: StoreEntry | None) -> bool:
        """Replace the entry `previous`; None: there must be none.

        Return False if the entry in the store is another one.
        """
        number = 1 if previous is None else previous.number + 1
        # the random part tells this text from one that another worker writes at the same time
        signed = f"{secrets.token_hex(8)} {number} {value}"
        entry = StoreEntry(number, f"{self._sign(key, signed)} {signed}")
        with self._lock:
            found = self._compare_set(key, "" if previous is None else previous.text, entry.text)
            if found != entry.text:
                return False
            self._seen[key] = entry
        return True

    def claim(self, prefix: str, value: Callable[[int], str]) -> int:
        """Write `value(number)` under a free key ``<prefix>/<number>``. Return the number.

        A counter in the store gives the numbers. If the workers looked for the first free key
        instead, those that come at once would compete for each key, and the number of requests
        would grow with the square of their number.
        """
        while True:
            number = self._count(f"{prefix}s") - 1
            if self.write(f"{prefix}/{number}", value(number), None):
                return number

    def exists(self, *keys: str) -> bool:
        """Return whether the store has all these keys, whoever wrote them."""
        with self._lock:
            return self._have(keys)

    def read_unsigned(self, key: str) -> str | None:
        """Return a text that anybody may have written: for messages to a person only."""
        with self._lock:
            return self._get(key)

    def write_unsigned(self, key: str, text: str) -> None:
        """Write a text for `read_unsigned`."""
        with self._lock:
            self._compare_set(key, self._get(key) or "", text)

    def close(self) -> None:
        """Release the store."""
        self._store = None

    def _have(self, keys: Sequence[str]) -> bool:
        self._connection.require_open()
        try:
            return bool(self._store.check(list(keys)))
        except (RuntimeError, AttributeError) as error:  # as in `_get`
            raise _no_answer(error) from error

    def _get(self, key: str) -> str | None:
        if not self._have([key]):
            return None
        try:
            return bytes(self._store.get(key)).decode("utf-8", "replace")
        # the worker that hosted the store has ended, or this one has left
        except (RuntimeError, AttributeError) as error:
            raise _no_answer(error) from error

    def _compare_set(self, key: str, expected: str, text: str) -> str:
        self._connection.require_open()
        try:
            found = self._store.compare_set(key, expected, text)
        except (RuntimeError, AttributeError) as error:
            raise _no_answer(error) from error
        return bytes(found).decode("utf-8", "replace")

    def _count(self, key: str) -> int:
        with self._lock:
            try:
                return int(self._store.add(key, 1))
            except (RuntimeError, AttributeError) as error:
                raise _no_answer(error) from error

    def _sign(self, key: str, signed: str) -> str:
        message = _SEPARATOR.join((self.group, key, signed)).encode()
        return hmac.digest(self._key, message, hashlib.sha256).hex()

    def _parse(self, key: str, text: str) -> StoreEntry | None:
        """Return the entry that a text holds; None if its HMAC is wrong."""
        signature, _, signed = text.partition(" ")
        if not hmac.compare_digest(signature.encode(), self._sign(key, signed).encode()):
            return None
        return StoreEntry(int(signed.split(" ", 2)[1]), text)


def _tampered(key: str, subject: str, what: str) -> StoreTampered:
    return StoreTampered(
        f"the store's entry for {subject} ({key}) {what}. It is not used. "
        "Find out who can write to the store, then start the group again"
    )


def _removed(key: str, subject: str) -> StoreTampered:
    return _tampered(key, subject, "was removed, which no worker of the group does")


def _no_answer(error: BaseException) -> JoinError:
    reason = str(error).partition("\n")[0]  # without the C++ frames of torch
    return JoinError(f"the group's store does not answer: {reason}")

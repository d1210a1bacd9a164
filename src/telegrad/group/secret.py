"""The secret that all workers of a group share.

It comes from the config or ``TELEGRAD_SECRET``. Otherwise it is read from a key file that is made
on first use and that only this user can read, so workers of one user on one machine need no
setting. Between machines that do not share a home directory, a secret must be given.

A secret that a person has chosen could be guessed: whoever records a handshake can try guesses
without asking a worker. So the key of the group is derived from it by scrypt, which makes every
guess cost about 0.1 s and 32 MB. A secret of at least 64 hexadecimal digits is taken as a random
key, which nobody can guess, and is not stretched. (A PAKE would prevent guessing altogether, but
neither Python nor OpenSSL has one.)
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from telegrad.errors import UsageError

_MIN_LENGTH = 16
_RANDOM_KEY = re.compile(r"[0-9a-fA-F]{64,}")
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}


def group_key(given: str | None) -> bytes:
    """Return the key that handshakes use, derived from the given secret or the key file."""
    return _derive_key(given if given is not None else own_secret())


def own_secret() -> str:
    """Return the secret in the key file of this user, which is made if it does not exist."""
    return _read_key_file(key_file())


def is_random_key(secret: str) -> bool:
    """Return whether a secret is a random key, which needs no stretching."""
    return _RANDOM_KEY.fullmatch(secret) is not None


@functools.lru_cache(maxsize=16)  # a process may open many agents
def _derive_key(secret: str) -> bytes:
    data = secret.encode()
    if is_random_key(secret):
        return hashlib.sha256(b"telegrad secret\0" + data).digest()
    return hashlib.scrypt(data, salt=b"telegrad secret", **_SCRYPT)


def key_file() -> Path:
    """Return the path of this user's key file."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "state"
    )
    return Path(base) / "telegrad" / "secret"


def _read_key_file(path: Path) -> str:
    """Read the key, and make it first if it does not exist.

    Several processes may make it at once: the first to link its file wins.
    """
    if not path.exists():
        _make_key_file(path)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{path} must belong to you and be readable by you alone: chmod 600 it, "
            "or set TELEGRAD_SECRET"
        )
    text = path.read_bytes().decode("ascii", "replace").strip()
    if "\ufffd" in text or len(text) < _MIN_LENGTH:
        raise UsageError(
            f"{path} holds no key of at least {_MIN_LENGTH} characters: delete it, "
            "and a new one is made"
        )
    return text


def _make_key_file(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first; its key counts
        finally:
            draft.unlink()
    except OSError as error:
        raise UsageError(
            f"no secret: cannot write {path} ({error}); set TELEGRAD_SECRET or Config.secret"
        ) from error

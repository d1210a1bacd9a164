"""AES-256-GCM for large messages: OpenSSL's `libcrypto`, or the package `cryptography`.

`ssl` encrypts 16 KB per call and holds the interpreter lock between the calls, so several threads
are hardly faster than one. There are two faster ways, which have the same results:

- `LibraryCipher` calls `libcrypto` by `ctypes`, which releases the interpreter lock: the threads of
  several stripes encrypt at the same time. The library is the one that `ssl` uses; if `ssl`
  contains it, the system's one is used.
- `PackageCipher` uses `cryptography`, if it is installed and new enough to write into given
  buffers. It holds the interpreter lock, but brings a newer OpenSSL, which is three times as fast
  as OpenSSL 3.0 on processors with vector instructions for AES.

The first is used unless the second is faster than several threads of it. Without both,
`is_available` returns False, and stripes use TLS.

State: a cipher is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import functools
import hmac
import ssl
import struct
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from telegrad.cores import CORES

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
# RFC 8446 permits 2 ** 24.5 records of 16 KB with one key, 380 GB. Records have at most 512 KB
# here, so a key is used for 256 GB.
RECORDS_PER_KEY = 1 << 19

_LIBRARIES = ("libcrypto.so.3", "libcrypto.so.1.1")
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_...
_KEEP = -1  # the direction of the context stays
# Threads that can encrypt at the same time: one per core, and per stripe by default. A cipher that
# holds the interpreter lock must be faster than all of them together to be used.
_THREADS = min(CORES, 4)
_TRIAL = 1 << 17  # bytes, to compare speeds
_pack_nonce = struct.Struct(">4xQ").pack

_POINTER, _INT, _BYTES = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # the type of the result, then those of the arguments
    "EVP_aes_256_gcm": (_POINTER,),
    "EVP_CIPHER_CTX_new": (_POINTER,),
    "EVP_CIPHER_CTX_free": (None, _POINTER),
    "EVP_CIPHER_CTX_ctrl": (_INT, _POINTER, _INT, _INT, _POINTER),
    "EVP_CipherInit_ex": (_INT, _POINTER, _POINTER, _POINTER, _BYTES, _BYTES, _INT),
    "EVP_CipherUpdate": (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT),
    "EVP_CipherFinal_ex": (_INT, _POINTER, _POINTER, _POINTER),
}
# Test case 14 of the specification of GCM (McGrew and Viega): 16 zero bytes with a zero key.
_EXPECTED = bytes.fromhex("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919")


Bytes = bytes | memoryview


class TagError(Exception):
    """Data is not what the holder of the key has sealed."""


class Cipher(ABC):
    """One direction of one connection: seal, or open what the peer has sealed."""

    @abstractmethod
    def __init__(self, key: bytes, seals: bool) -> None: ...

    @abstractmethod
    def seal(self, nonce: bytes, about: Bytes, data: Bytes, sealed: memoryview) -> None:
        """Encrypt `data` into `sealed`, which is longer by `TAG_BYTES`, for the tag.

        The tag covers `about`, too.
        """

    @abstractmethod
    def open(self, nonce: bytes, about: Bytes, sealed: memoryview, data: memoryview) -> None:
        """Decrypt `sealed` into `data`. Raise `TagError` if it is not what the peer has sealed.

        Do not use `data` then.
        """


class RecordCipher:
    """Seal the records that one end of a connection sends, or open those that it receives.

    Every record has a number, which is its nonce. Every connection, direction and purpose has keys
    of its own, so no key has two records with the same number.
    """

    def __init__(
        self,
        session_key: bytes,
        purpose: bytes,
        server_side: bool,
        seals: bool,
        implementation: type[Cipher] | None = None,
    ) -> None:
        """The implementation is the one that `is_available` has found by default."""
        direction = b"server to client" if server_side is seals else b"client to server"
        found = implementation or _fastest()
        assert found is not None
        self._implementation = found
        self._label = b"telegrad " + purpose
        self._seals = seals
        self._records = 0
        self._has_failed = False
        self._key = hmac.digest(session_key, self._label + b" " + direction, "sha256")
        self._cipher = found(self._key, seals)

    def seal(self, about: Bytes, data: Bytes, sealed: memoryview) -> None:
        """Encrypt the next record; see `Cipher.seal`."""
        self._cipher.seal(self._next_nonce(), about, data, sealed)

    def open(self, about: Bytes, sealed: memoryview, data: memoryview) -> None:
        """Decrypt the next record; see `Cipher.open`.

        After a record that failed, all others fail, also genuine ones: no record is left out.
        """
        if self._has_failed:
            raise TagError("an earlier message was changed on its way")
        self._has_failed = True  # unless this returns
        self._cipher.open(self._next_nonce(), about, sealed, data)
        self._has_failed = False

    def _next_nonce(self) -> bytes:
        number = self._records
        if number and number % RECORDS_PER_KEY == 0:
            self._key = hmac.digest(self._key, self._label + b" next", "sha256")
            self._cipher = self._implementation(self._key, self._seals)
        self._records = number + 1
        return _pack_nonce(number)


def is_available() -> bool:
    """Return whether this process can use AES-256-GCM."""
    return _fastest() is not None


@functools.cache
def has_package() -> bool:
    """Return whether this process can use `PackageCipher`."""
    return _package() is not None and _works(PackageCipher)


class PackageCipher(Cipher):
    """AES-256-GCM of the package `cryptography`."""

    def __init__(self, key: bytes, seals: bool) -> None:
        package = _package()
        assert package is not None
        self._cipher: Any = package.cipher(key)
        self._invalid_tag = package.invalid_tag

    def seal(self, nonce: bytes, about: Bytes, data: Bytes, sealed: memoryview) -> None:
        self._cipher.encrypt_into(nonce, data, about, sealed)

    def open(self, nonce: bytes, about: Bytes, sealed: memoryview, data: memoryview) -> None:
        try:
            self._cipher.decrypt_into(nonce, sealed, about, data)
        except self._invalid_tag:
            raise TagError("a message was changed on its way") from None


class LibraryCipher(Cipher):
    """AES-256-GCM of OpenSSL's `libcrypto`, without the interpreter lock."""

    def __init__(self, key: bytes, seals: bool) -> None:
        self._library = library = _library()
        self._count = ctypes.byref(ctypes.c_int())  # bytes that a call has written
        self._rest = ctypes.create_string_buffer(TAG_BYTES)  # GCM never writes anything there
        self._context = library.EVP_CIPHER_CTX_new()
        if not self._context:
            raise MemoryError("OpenSSL has no memory")
        cipher = library.EVP_aes_256_gcm()
        _check(library.EVP_CipherInit_ex(self._context, cipher, None, key, None, int(seals)))

    def __del__(self) -> None:
        context, self._context = getattr(self, "_context", None), None
        if context:
            self._library.EVP_CIPHER_CTX_free(context)

    def seal(self, nonce: bytes, about: Bytes, data: Bytes, sealed: memoryview) -> None:
        target, size = _address_of(sealed), len(data)
        self._process(nonce, about, _address_of(data), target, size)
        _check(self._end())
        _check(self._library.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, TAG_BYTES, target + size))

    def open(self, nonce: bytes, about: Bytes, sealed: memoryview, data: memoryview) -> None:
        source, size = _address_of(sealed), data.nbytes
        self._process(nonce, about, source, _address_of(data), size)
        _check(self._library.EVP_CIPHER_CTX_ctrl(self._context, _SET_TAG, TAG_BYTES, source + size))
        if self._end() != 1:
            raise TagError("a message was changed on its way")

    def _process(self, nonce: bytes, about: Bytes, source: int, target: int, size: int) -> None:
        library, context, count = self._library, self._context, self._count
        _check(library.EVP_CipherInit_ex(context, None, None, None, nonce, _KEEP))
        _check(library.EVP_CipherUpdate(context, None, count, bytes(about), len(about)))
        _check(library.EVP_CipherUpdate(context, target, count, source, size))

    def _end(self) -> int:
        result: int = self._library.EVP_CipherFinal_ex(self._context, self._rest, self._count)
        return result


def _check(result: int) -> None:
    if result != 1:
        raise ssl.SSLError("OpenSSL refused to encrypt")


def _address_of(memory: Bytes) -> int:
    """Return where a buffer is. The caller keeps it alive."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


@functools.cache
def _library() -> Any:
    """Return OpenSSL's `libcrypto`; None if it is not found."""
    own = getattr(ssl._ssl, "__file__", None)  # type: ignore[attr-defined]
    for name in (own, *_LIBRARIES):
        try:
            library = ctypes.CDLL(name)
            for function, (result, *arguments) in _PROTOTYPES.items():
                prototype = getattr(library, function)
                prototype.restype, prototype.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        return library
    return None


class _Package(NamedTuple):
    """The names of `cryptography`."""

    cipher: type
    invalid_tag: type[Exception]


@functools.cache
def _package() -> _Package | None:
    """Return the names of `cryptography`; None if it is missing or too old."""
    try:
        # imported here: it takes 20 ms
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError:  # it is needed before Python 3.13 only
        return None
    return _Package(AESGCM, InvalidTag) if hasattr(AESGCM, "encrypt_into") else None


@functools.cache
def _fastest() -> type[Cipher] | None:
    """Return the implementation to use; None if there is none that works."""
    implementations: list[type[Cipher]] = []
    if _library() is not None and _works(LibraryCipher):
        implementations.append(LibraryCipher)
    if has_package():
        implementations.append(PackageCipher)
    if len(implementations) == 2:
        without_lock, with_lock = (_seconds(each) for each in implementations)
        if without_lock > _THREADS * with_lock:
            implementations.reverse()
    return implementations[0] if implementations else None


def _works(implementation: type[Cipher]) -> bool:
    """Return whether an implementation computes an example of the specification."""
    sealed = memoryview(bytearray(len(_EXPECTED)))
    cipher = implementation(bytes(KEY_BYTES), True)
    cipher.seal(bytes(NONCE_BYTES), b"", memoryview(bytes(16)), sealed)
    return bytes(sealed) == _EXPECTED


def _seconds(implementation: type[Cipher]) -> float:
    """Return the shortest time that an implementation takes to seal a message."""
    cipher = implementation(bytes(KEY_BYTES), True)
    data, sealed = memoryview(bytes(_TRIAL)), memoryview(bytearray(_TRIAL + TAG_BYTES))
    times = []
    for number in range(5):
        started = time.perf_counter()
        cipher.seal(number.to_bytes(NONCE_BYTES, "big"), b"", data, sealed)
        times.append(time.perf_counter() - started)
    return min(times)

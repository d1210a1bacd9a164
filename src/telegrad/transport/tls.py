"""TLS between workers, keyed by the secret of the group, without certificates to make.

Three ways, all TLS 1.3 with fresh session keys (forward secrecy):

- From Python 3.13 on: a pre-shared key (PSK) that is derived from the group's key. Who does not
  know it cannot finish the TLS handshake.
- Older Pythons: the side that accepts makes a certificate that is valid for this process only.
  Nobody could verify it; instead, the proofs of `wire.handshake` cover its fingerprint, so a
  handshake that somebody relays through a TLS connection of his own fails.
- Given certificates (``TELEGRAD_TLS_CA``, ``TELEGRAD_TLS_CERT``, ``TELEGRAD_TLS_KEY``): both sides
  must present a certificate that the CA has signed. The proofs cover its fingerprint, too.

State: the contexts are made on first use, under `_lock`.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import importlib.util
import os
import ssl
import tempfile
from typing import Any

from telegrad.config import Config
from telegrad.errors import AuthenticationError, UsageError
from telegrad.locks import new_lock

_IDENTITY = "telegrad"
_NO_CRYPTOGRAPHY = (
    "TLS between hosts needs the package 'cryptography' before Python 3.13: "
    "pip install cryptography, or set TELEGRAD_TLS=off on every worker"
)
HAS_PSK = getattr(ssl, "HAS_PSK", False)


class TlsContexts:
    """The settings of TLS of one agent, for the connections that it opens and accepts."""

    def __init__(self, config: Config, key: bytes) -> None:
        self._config = config
        self._psk = hmac.digest(key, b"telegrad tls psk", "sha256")
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._fingerprint = b""  # of this worker's own certificate
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<TlsContexts {self.describe()}>"

    @property
    def enabled(self) -> bool:
        """Whether TCP connections are encrypted."""
        return self._config.tls == "on"

    @property
    def uses_psk(self) -> bool:
        """Whether connections are authenticated by a pre-shared key instead of certificates."""
        return HAS_PSK and self._config.tls_cert is None

    def describe(self) -> str:
        """Return how connections are encrypted."""
        if self._config.tls == "off":
            return "off"
        if self._config.tls_cert is not None:
            return "TLS 1.3 with given certificates"
        return "TLS 1.3 with a pre-shared key" if HAS_PSK else "TLS 1.3 with ephemeral certificates"

    def check_usable(self) -> None:
        """Raise `UsageError` if files or packages are missing that TLS needs here."""
        if self._config.tls_cert is not None:
            self.context(server_side=True)
        elif self.enabled and not HAS_PSK and importlib.util.find_spec("cryptography") is None:
            raise UsageError(_NO_CRYPTOGRAPHY)

    def context(self, server_side: bool) -> ssl.SSLContext:
        """Return the context for connections of one side."""
        with self._lock:
            if server_side not in self._contexts:
                self._contexts[server_side] = self._make(server_side)
            return self._contexts[server_side]

    def binding(self, tls: ssl.SSLObject | ssl.SSLSocket, server_side: bool) -> bytes:
        """Return what identifies a TLS connection, the same at both ends, and only there."""
        if server_side:
            return b"psk" if self.uses_psk else self._fingerprint
        certificate = tls.getpeercert(binary_form=True)
        if self.uses_psk:
            # A server that presents a certificate has not proven that it knows the key.
            if certificate is not None:
                raise AuthenticationError("the worker that was called did not use the group's key")
            return b"psk"
        return hashlib.sha256(certificate or b"").digest()

    def _make(self, server_side: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the handshake above TLS checks who answers
        if hasattr(context, "set_ciphersuites"):  # Python 3.15: the fastest with AES instructions
            context.set_ciphersuites("TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256")
        if server_side:
            context.num_tickets = 0  # no session is ever resumed
        if self._config.tls_cert is not None:
            self._use_given_certificates(context)
        elif HAS_PSK:
            self._use_psk(context, server_side)
        elif server_side:
            self._use_ephemeral_certificate(context)
        else:
            context.verify_mode = ssl.CERT_NONE  # the proofs cover the certificate
        return context

    def _use_psk(self, context: ssl.SSLContext, server_side: bool) -> None:
        # An attacker could offer a certificate instead of the key: none is trusted.
        context.verify_mode = ssl.CERT_NONE if server_side else ssl.CERT_REQUIRED
        psk_context: Any = context  # these methods are new in Python 3.13
        # The callbacks are methods of C: inside one in Python, a signal handler can run, and what
        # it raises would be lost and would make the TLS handshake fail.
        if server_side:
            psk_context.set_psk_server_callback({_IDENTITY: self._psk}.get, _IDENTITY)
        else:
            psk_context.set_psk_client_callback({None: (_IDENTITY, self._psk)}.get)  # no hint

    def _use_given_certificates(self, context: ssl.SSLContext) -> None:
        config = self._config
        assert config.tls_cert is not None
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
            context.load_verify_locations(config.tls_ca)
            with open(config.tls_cert, encoding="ascii") as file:
                text = file.read()
            start = text.index("-----BEGIN CERTIFICATE-----")
            end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
            certificate = ssl.PEM_cert_to_DER_cert(text[start:end])
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot use the certificate {config.tls_cert!r} with the key {config.tls_key!r} "
                f"and the CA {config.tls_ca!r}: {error}; check TELEGRAD_TLS_CERT, TELEGRAD_TLS_KEY "
                "and TELEGRAD_TLS_CA"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        self._fingerprint = hashlib.sha256(certificate).digest()

    def _use_ephemeral_certificate(self, context: ssl.SSLContext) -> None:
        pem, certificate = _make_certificate()
        # `ssl` loads certificates from files only
        with tempfile.NamedTemporaryFile() as file:  # readable by this user alone
            os.fchmod(file.fileno(), 0o600)
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
        self._fingerprint = hashlib.sha256(certificate).digest()


def _make_certificate() -> tuple[bytes, bytes]:
    """Return a new private key with its self-signed certificate as PEM, and the latter as DER."""
    try:
        # imported here: only these Pythons need it
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(_NO_CRYPTOGRAPHY) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _IDENTITY)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # nobody checks these: clocks of hosts may differ
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 1, 1))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (
        pem + certificate.public_bytes(serialization.Encoding.PEM),
        certificate.public_bytes(serialization.Encoding.DER),
    )

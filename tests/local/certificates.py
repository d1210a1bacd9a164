"""Certificates for tests: a certificate authority that signs those of workers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

VALID = (datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1))
EXPIRED = (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2))


class Authority:
    """A certificate authority, with its files in `folder`."""

    def __init__(self, folder: Path, name: str, signed_by: Authority | None = None) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _sign(name, self._key, signed_by or self, VALID, is_authority=True)
        # the certificates between a worker's and that of the authority that workers know
        self._chain: bytes = b""
        if signed_by is not None:
            self._chain = _pem(self._certificate) + signed_by._chain
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(self._certificate))

    @property
    def subject(self) -> x509.Name:
        """The name in the certificates that it signs."""
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self._name)])

    def sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        """Return a signed certificate."""
        return builder.sign(self._key, hashes.SHA256())

    def settings(
        self,
        name: str,
        trusted: Authority | None = None,
        valid: tuple[datetime.datetime, datetime.datetime] = VALID,
    ) -> dict[str, Any]:
        """Return the fields of `Config` for a worker with a new certificate of this authority.

        The worker accepts those of `trusted`, which is this authority by default.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(name, key, self, valid, is_authority=False)
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(_pem(certificate) + self._chain)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        ca = (trusted or self).path
        return {"tls_ca": str(ca), "tls_cert": str(cert_path), "tls_key": str(key_path)}


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: Authority,
    valid: tuple[datetime.datetime, datetime.datetime],
    is_authority: bool,
) -> x509.Certificate:
    constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
    return issuer.sign(
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(constraints, critical=True)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

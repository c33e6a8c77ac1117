"""The webhook's certificates: an authority derived from the operator's key, and certificates signed
by it.

Each operator derives the same authority, to the last byte, and signs a certificate of its own for a
few days. The API server trusts the authority, and so every operator; no key is stored.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unbroken.core.keys import authority_number

VALID_DAYS, RENEW_DAYS = 7.0, 4.0
"""Days that an operator's certificate lasts; it is renewed when fewer than `RENEW_DAYS` are
left."""
EARLY = timedelta(hours=1)
"""Time by which validity begins before the certificate is made: clocks differ."""
DAY = 86400.0
BEGIN, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Validity of the authority, which lasts as long as the operator's key (RFC 5280, 4.1.2.5)."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An operator's certificate and its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    renewal: float
    """Time at which it is to be renewed, in seconds since the epoch."""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Use it for every connection from now on; nothing is written to a disk."""
        handle = os.memfd_create("unbroken-webhook", os.MFD_CLOEXEC)
        with os.fdopen(handle, "wb") as file:
            file.write(self.key + self.certificate)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{handle}")


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs operators' certificates."""

    certificate: bytes
    """PEM of the authority, which the API server must trust."""
    _key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def of(cls, master: bytes) -> Authority:
        """Return the authority that belongs to an operator's key."""
        key = ec.derive_private_key(authority_number(master), ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        title = _title(f"unbroken webhook authority {identifier.digest.hex()[:8]}")
        made = (
            x509.CertificateBuilder()
            .subject_name(title)
            .issuer_name(title)
            .public_key(key.public_key())
            .serial_number(int.from_bytes(identifier.digest[:16], "big") >> 1 | 1)
            .not_valid_before(BEGIN)
            .not_valid_after(END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_signs_certificates(), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
        )
        return cls(made.public_bytes(serialization.Encoding.PEM), key)

    def issue(self, names: Sequence[str], now: float) -> Leaf:
        """Return a new certificate for the names that the API server uses."""
        key, start = ec.generate_private_key(ec.SECP256R1()), datetime.fromtimestamp(now, UTC)
        authority = x509.load_pem_x509_certificate(self.certificate)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            x509.CertificateBuilder()
            .subject_name(_title("unbroken webhook"))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start - EARLY)
            .not_valid_after(start + timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        renewal = now + (VALID_DAYS - RENEW_DAYS) * DAY
        return Leaf(made.public_bytes(serialization.Encoding.PEM), private, renewal)


def _title(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)

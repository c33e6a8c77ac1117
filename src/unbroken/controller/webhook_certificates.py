"""The webhook's certificate: made here, kept in a Secret, renewed long before it ends.

It signs itself, so that there is no authority whose key could sign others.  What the API server is
told to trust is this certificate and those before it that are still valid: whoever has yet to take
a new one goes on being believed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS, RENEW_DAYS = 90.0, 30.0
"""Renewed when fewer days are left (both as Let's Encrypt has it)."""
EARLY = timedelta(hours=1)
"""Valid from before it is made: clocks differ."""
CERTIFICATE, KEY, TRUSTED = "tls.crt", "tls.key", "ca.crt"
"""Keys of the Secret."""
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """As PEM: the own certificate with its key, and all that are to be trusted."""

    certificate: bytes
    key: bytes
    trusted: bytes

    def renewal(self) -> float:
        """When it is to be renewed, in seconds since the epoch."""
        return _ends(_loaded(self.certificate)[0]) - RENEW_DAYS * DAY


def kept(data: Mapping[str, Any] | None) -> Certificates | None:
    """The certificates of a Secret's `data`; None where they cannot be used."""
    try:
        read = [base64.b64decode((data or {})[key], validate=True) for key in _KEYS]
        found = Certificates(*read)
        (own, *_) = _loaded(found.certificate)
        key = serialization.load_pem_private_key(found.key, None)
        is_pair = key.public_key() == own.public_key()
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None
    return found if is_pair and own in _loaded(found.trusted) else None


_KEYS = (CERTIFICATE, KEY, TRUSTED)


def secret_data(certificates: Certificates) -> dict[str, str]:
    """`data` of the Secret that keeps them."""
    values = (certificates.certificate, certificates.key, certificates.trusted)
    return {key: base64.b64encode(value).decode() for key, value in zip(_KEYS, values, strict=True)}


def renewed(found: Certificates | None, names: Sequence[str], now: float) -> Certificates:
    """Those that are to be used: `found` while they are good for `names`, else new ones."""
    if found is not None and now < found.renewal() and _names(found) == set(names):
        return found
    key = ec.generate_private_key(ec.SECP256R1())
    made = _signed(key, names, now)
    before = _loaded(found.trusted) if found is not None else []
    valid = [one for one in before if now < _ends(one)]
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Certificates(_pem([made]), private, _pem([made, *valid]))


def _signed(key: ec.EllipticCurvePrivateKey, names: Sequence[str], now: float) -> x509.Certificate:
    title = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "unbroken webhook")])
    start = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(title)
        .issuer_name(title)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - EARLY)
        .not_valid_after(start + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _names(found: Certificates) -> set[str]:
    (own, *_) = _loaded(found.certificate)
    extension = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, extension.get_values_for_type(x509.IPAddress))
    return {*extension.get_values_for_type(x509.DNSName), *addresses}


def _loaded(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


def _pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def _ends(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()

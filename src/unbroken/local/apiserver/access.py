"""Access to the server: its token, its certificate, the kubeconfig that carries both.

Everything is made once for a directory and kept there, readable by its owner only.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import yaml

VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
"""A fixed past moment: a laptop whose clock was wrong can still use its cluster."""
VALID_DAYS = 36500


@dataclass(frozen=True, slots=True)
class Identity:
    """Secrets of one cluster."""

    token: str
    kubelet_token: str
    certificate: bytes
    """PEM; it is its own authority."""
    tls: ssl.SSLContext


def identity(directory: Path) -> Identity:
    """The directory's secrets, made now if it has none."""
    token = _kept(directory / "token", lambda: secrets.token_urlsafe(32).encode())
    kubelet_token = _kept(directory / "kubelet-token", lambda: secrets.token_urlsafe(32).encode())
    _kept(directory / "server.pem", _certificate)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(directory / "server.pem")
    pem = (directory / "server.pem").read_bytes()
    start = pem.index(b"-----BEGIN CERTIFICATE-----")
    return Identity(token.decode(), kubelet_token.decode(), pem[start:], tls)


def _kept(path: Path, make: Callable[[], bytes]) -> bytes:
    if not path.exists():
        write_private(path, make())
    return path.read_bytes()


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, whole or not at all."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _certificate() -> bytes:
    """Key and self-signed certificate for the loopback names, as PEM."""
    # Imported here: needed once in a directory's life, and slow to load.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "unbroken")])
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    names = [x509.DNSName("localhost"), x509.DNSName("kubernetes.default.svc")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_FROM + timedelta(days=VALID_DAYS))
        .add_extension(
            x509.SubjectAlternativeName([*names, *map(x509.IPAddress, addresses)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def last_port(directory: Path, wanted: int) -> tuple[int, ...]:
    """Ports to try: the one asked for, else that of the last run and then any."""
    if wanted:
        return (wanted,)
    try:
        config = yaml.safe_load((directory / "kubeconfig").read_bytes())
        return (int(config["clusters"][0]["cluster"]["server"].rpartition(":")[2]), 0)
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError, ValueError):
        return (0,)  # none yet, or one that a person has edited: any port will do


def write_kubeconfig(path: Path, url: str, known: Identity) -> Path:
    """Write a kubeconfig for `url` to `path`; returns the path."""
    cluster = {"server": url}
    if url.startswith("https:"):
        cluster["certificate-authority-data"] = base64.b64encode(known.certificate).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "unbroken", "cluster": cluster}],
        "users": [{"name": "unbroken", "user": {"token": known.token}}],
        "contexts": [{"name": "unbroken", "context": {"cluster": "unbroken", "user": "unbroken"}}],
        "current-context": "unbroken",
        "preferences": {},
    }
    write_private(path, msgspec.yaml.encode(config))
    return path

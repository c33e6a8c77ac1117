"""The webhook's own process, and an API server that records its requests."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests import loopback
from tests.apiservers import kubeconfig_of
from tests.watching import PATIENCE_SECONDS, running, until
from unbroken.kube.clock import wall
from unbroken.operator.webhook.certificates import Authority
from unbroken.operator.webhook.registration import WebhookProcess
from unbroken.operator.webhook.server import WebhookSettings

Object = dict[str, Any]
SECRET_PATH = "/validate/5ec2e7"
PATIENT = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
"""The default has 30 s for a connection, and a process that starts on a busy machine takes long."""


@dataclass
class Webhook:
    """A running webhook, and the way to send it requests."""

    port: int
    trusted: bytes
    process: WebhookProcess
    asked: list[tuple[str, Object]] = field(default_factory=list)
    """Path and body of each request to the API server."""
    creators: set[str] = field(default_factory=set)
    """Users that may create pods."""

    def tls(self) -> ssl.SSLContext:
        """Return a context that trusts it."""
        return ssl.create_default_context(cadata=self.trusted.decode())

    @property
    def address(self) -> str:
        """Address without a path."""
        return f"https://127.0.0.1:{self.port}"

    async def post(self, body: Any, path: str = SECRET_PATH, tls: Any = None) -> tuple[int, Any]:
        """Send one review; return status and answer."""
        connector = aiohttp.TCPConnector(ssl=tls or self.tls())
        async with (
            aiohttp.ClientSession(connector=connector, timeout=PATIENT) as session,
            session.post(
                f"{self.address}{path}",
                **({"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}),
            ) as answer,
        ):
            return answer.status, await answer.json(content_type=None)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, and send nothing."""
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls())

    @property
    def pid(self) -> int:
        """Pid of the process that answers now."""
        assert self.process._process is not None
        return self.process._process.pid

    def memory(self) -> int:
        """Return the resident bytes of the process."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request to the API server."""
        body = await request.json()
        self.asked.append((request.path_qs, body))
        if "subjectaccessreviews" in request.path:
            allowed = body["spec"].get("user") in self.creators
            return web.json_response({**body, "status": {"allowed": allowed}}, status=201)
        return web.json_response(body, status=201)


@asynccontextmanager
async def webhook(
    folder: Path, client_authority: str, silence_seconds: float
) -> AsyncIterator[Webhook]:
    """Run a webhook until the block ends."""
    authority = Authority.of(secrets.token_bytes(32))
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    kubeconfig = folder / "kubeconfig"
    settings = WebhookSettings(
        listening.fileno(),
        SECRET_PATH,
        authority.issue(["127.0.0.1"], wall()),
        client_authority,
        str(kubeconfig),
        silence_seconds=silence_seconds,
    )
    process = WebhookProcess(listening, settings)
    made = Webhook(listening.getsockname()[1], authority.certificate, process)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", made.handle)
    async with loopback.serving(application) as port:
        kubeconfig.write_text(kubeconfig_of(f"http://127.0.0.1:{port}", "", "t"))
        with listening:
            async with running(process.run()):
                await until(lambda: process._process, lambda found: found is not None)
                yield made


def client_certificate(folder: Path) -> tuple[str, Path]:
    """Return an authority's PEM text, and a file with a client's certificate and key by it."""
    authority, certificate = _signed("front proxy", None, is_authority=True)
    key, client = _signed("apiserver", (authority, certificate), is_authority=False)
    file = folder / "client.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(private + client.public_bytes(serialization.Encoding.PEM))
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), file


def _signed(
    name: str,
    by: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None,
    *,
    is_authority: bool,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, issuer = (key, subject) if by is None else (by[0], by[1].subject)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    return key, made

"""Runs the cluster API: sockets, TLS, the clock, random ids."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from aiohttp.http_exceptions import HttpProcessingError

from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import pause, wall
from unbroken.listener import Limits, bound, serving
from unbroken.log_lines import Log

from .server import BODY_SECONDS, Service, application
from .signatures import UsedSignatures, read_credentials
from .store import CallContext, ClusterStore

log = Log(__name__)

CLOSING_SECONDS = 2.0
LIMITS = Limits(256, BODY_SECONDS + 5.0)
"""Each connection may hold a body of 1 MiB; a client whose body comes too slowly gets an error that
says so."""
IDLE_SECONDS = 10.0
"""Seconds until a connection without a whole request head is closed; boto3 opens another one."""
LINGERING_SECONDS = 1.0
"""Seconds for reading the rest of a refused request, so that its client sees the refusal."""
CERTIFICATE_SECONDS = 10.0
"""Seconds between two looks at the files of the certificate, which may be renewed."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM; the certificate's with the chain of its issuers."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class ClusterApiOptions:
    """Address of the cluster API, and the credentials that it accepts."""

    credentials: Path | None
    """File of keys, in the form of ~/.aws/credentials; None is refused."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    tls: Tls | None = None
    """None: plain HTTP."""
    region: str = "us-west-2"
    account: str = "000000000000"
    """Account of the ARNs of clusters whose ExecutionRole names none."""
    makes_machines: bool = True
    """True if a program in the cluster makes the Machines of Clusters; False: operations that add
    instances are refused."""
    keeps_checkpoints: bool = False
    """True if the nodes' checkpoint memory follows TieredStorageConfig; False: Mode Enable is
    refused."""


@asynccontextmanager
async def serve_cluster_api(client: KubeClient, options: ClusterApiOptions) -> AsyncIterator[str]:
    """Serve the cluster API during the block; its address, as `--endpoint-url` takes it.

    SpecError for credentials or a certificate that cannot be used, WorldError where it cannot
    listen.
    """
    if options.credentials is None:
        raise SpecError(
            "the cluster API needs credentials: write [default], aws_access_key_id = ... and "
            "aws_secret_access_key = ... to a file of mode 0600 and name it with "
            "--cluster-api-credentials FILE"
        )
    credentials = read_credentials(options.credentials)
    if options.tls is None and not _is_loopback(options.host):
        log.warning("cluster API has no TLS: captured requests can be read", address=options.host)
    around = CallContext(
        ClusterStore(client),
        wall,
        lambda digits: secrets.token_hex((digits + 1) // 2)[:digits],
        options.region,
        options.account,
        options.makes_machines,
        options.keeps_checkpoints,
    )
    service = Service(around, credentials, UsedSignatures(wall()))
    async with _certificate(options.tls) as tls, _listening(service, options, tls) as address:
        yield address


@asynccontextmanager
async def _listening(
    service: Service, options: ClusterApiOptions, tls: ssl.SSLContext | None
) -> AsyncIterator[str]:
    try:
        sockets = await bound(options.host, options.port)
    except OSError as error:
        text = f"the cluster API cannot listen on {options.host}:{options.port}: {error}"
        raise WorldError(text) from error
    host, port = sockets[0].getsockname()[:2]
    scheme = "http" if tls is None else "https"
    async with serving(
        application(service),
        sockets,
        LIMITS,
        tls,
        shutdown_seconds=CLOSING_SECONDS,
        logger=_http_log(),
        keepalive_timeout=IDLE_SECONDS,
        lingering_time=LINGERING_SECONDS,
        auto_decompress=False,
    ):
        yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@asynccontextmanager
async def _certificate(files: Tls | None) -> AsyncIterator[ssl.SSLContext | None]:
    """The certificate, loaded again whenever its files change.  SpecError."""
    if files is None:
        yield None
        return
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(tls, files)
    renewing = asyncio.ensure_future(_renew(tls, files))
    try:
        yield tls
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})


def _load(tls: ssl.SSLContext, files: Tls) -> None:
    try:
        # First on trial: a pair that does not fit would spoil the context in use.
        for ssl_context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls):
            # A key with a password would ask for it at the terminal.
            ssl_context.load_cert_chain(files.certificate, files.key, lambda: "")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise SpecError(
            f"cannot use the certificate {files.certificate} with the key {files.key}: {error}"
        ) from error


async def _renew(tls: ssl.SSLContext, files: Tls) -> None:
    loaded = _times(files)
    while True:
        await pause(CERTIFICATE_SECONDS)
        result = _times(files)
        if result == loaded:
            continue
        try:
            _load(tls, files)
        except SpecError as error:
            # Both files are written, one after the other; the old pair goes on until both are.
            log.warning("certificate not loaded", file=files.certificate, error=error)
            continue
        loaded = result
        log.info("certificate loaded", file=files.certificate)


def _times(files: Tls) -> tuple[int, ...]:
    try:
        return tuple(path.stat().st_mtime_ns for path in (files.certificate, files.key))
    except OSError:
        return ()  # they are being replaced


def _http_log() -> logging.Logger:
    """The log of the HTTP server, without a traceback for each client that speaks no HTTP."""
    logger = logging.getLogger(f"{__name__}.http")
    if not logger.filters:
        logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

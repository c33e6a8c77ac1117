"""Signature Version 4: who sent a request, and that nobody has changed it.  Pure.

Source: AWS "Signature Version 4 signing process", header signing.  The client's part (`sign`) is
for our own commands and for tests; real clients are the aws CLI and boto3.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from .errors import ApiError

ALGORITHM = "AWS4-HMAC-SHA256"
SERVICE = "sagemaker"
"""Signing name of the service (reference section 1.1)."""
SKEW_SECONDS = 300
"""AWS takes a request whose clock is that far off."""
DATE_FORMAT = "%Y%m%dT%H%M%SZ"
NEEDED = ("host", "x-amz-date", "x-amz-target")
"""Headers that must be signed: where to, when, and what."""
AUTHORIZATION = re.compile(
    rf"{ALGORITHM} +Credential=([^,\s]+), *SignedHeaders=([^,\s]+), *Signature=([0-9a-f]{{64}})"
)


@dataclass(frozen=True, slots=True)
class Credential:
    """A key that may call; `token` is of temporary ones."""

    key_id: str
    secret: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A request as it was sent; names of headers in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """What the Authorization header says."""

    key_id: str
    date: str
    region: str
    service: str
    signed: tuple[str, ...]
    signature: str

    @property
    def scope(self) -> str:
        """What the signature is good for."""
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def verify(message: Message, credentials: Mapping[str, Credential], now: float) -> Claim:
    """Who signed the request; `credentials` by key id, `now` in seconds since the epoch.

    ApiError as AWS would answer, without a hint at what the right signature is.
    """
    claim = read(message.headers)
    known = credentials.get(claim.key_id)
    if known is None:
        raise ApiError(
            "UnrecognizedClientException",
            "The security token included in the request is invalid.",
            403,
        )
    at = _signed_at(message.headers, claim)
    # A claim's own date and region are signed with; that they fit is checked first.
    wanted = _signature(message, claim, known.secret)
    if not hmac.compare_digest(wanted, claim.signature):
        raise _wrong(
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )
    if abs(now - at) > SKEW_SECONDS:
        said = datetime.fromtimestamp(at, UTC).strftime(DATE_FORMAT)
        ours = datetime.fromtimestamp(now, UTC).strftime(DATE_FORMAT)
        word = "expired" if at < now else "not yet current"
        raise _wrong(f"Signature {word}: {said} is more than {SKEW_SECONDS} s off {ours}")
    token = message.headers.get("x-amz-security-token", "")
    if not hmac.compare_digest(token.encode(), known.token.encode()):
        raise ApiError(
            "UnrecognizedClientException",
            "The security token included in the request is invalid.",
            403,
        )
    return claim


def read(headers: Mapping[str, str]) -> Claim:
    """The claim of the Authorization header; ApiError where there is none that can be read."""
    said = headers.get("authorization")
    if said is None:
        raise ApiError(
            "MissingAuthenticationTokenException", "Request is missing Authentication Token", 403
        )
    found = AUTHORIZATION.fullmatch(said.strip())
    parts = found[1].split("/") if found is not None else []
    if found is None or len(parts) < 5 or parts[-1] != "aws4_request":
        raise ApiError(
            "IncompleteSignatureException",
            f"Authorization header requires '{ALGORITHM} Credential=KEY/DATE/REGION/{SERVICE}/"
            "aws4_request, SignedHeaders=..., Signature=...'",
            403,
        )
    date, region, service = parts[-4:-1]
    claim = Claim("/".join(parts[:-4]), date, region, service, tuple(found[2].split(";")), found[3])
    missing = [name for name in NEEDED if name not in claim.signed]
    absent = [name for name in claim.signed if name not in headers]
    if missing or absent:
        raise _wrong(f"These headers must be signed and sent: {', '.join((*missing, *absent))}")
    if service != SERVICE:
        raise _wrong(f"Credential should be scoped to correct service: '{SERVICE}'.")
    return claim


def sign(message: Message, credential: Credential, region: str, now: float) -> dict[str, str]:
    """The headers to send: those of the message, its date and its signature."""
    stamp = datetime.fromtimestamp(now, UTC).strftime(DATE_FORMAT)
    headers = {**message.headers, "x-amz-date": stamp}
    if credential.token:
        headers["x-amz-security-token"] = credential.token
    signed = tuple(sorted(headers))
    claim = Claim(credential.key_id, stamp[:8], region, SERVICE, signed, "")
    full = Message(message.method, message.path, message.query, headers, message.body)
    signature = _signature(full, claim, credential.secret)
    headers["authorization"] = (
        f"{ALGORITHM} Credential={claim.key_id}/{claim.scope}, "
        f"SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return headers


def _signed_at(headers: Mapping[str, str], claim: Claim) -> float:
    stamp = headers["x-amz-date"]
    try:
        at = datetime.strptime(stamp, DATE_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise ApiError(
            "IncompleteSignatureException",
            f"Date must be in ISO-8601 'basic format'. Got '{stamp[:40]}'.",
            403,
        ) from error
    if stamp[:8] != claim.date:
        raise _wrong("Date in Credential scope does not match YYYYMMDD from the date of the header")
    return at.timestamp()


def _signature(message: Message, claim: Claim, secret: str) -> str:
    # Only one path and no query are served, so neither needs more than it came with.
    lines = [f"{name}:{' '.join(message.headers[name].split())}" for name in claim.signed]
    canonical = "\n".join(
        (
            *(message.method, message.path, message.query, *lines, ""),
            *(";".join(claim.signed), hashlib.sha256(message.body).hexdigest()),
        )
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join((ALGORITHM, message.headers["x-amz-date"], claim.scope, digest))
    key = f"AWS4{secret}".encode()
    for part in (claim.date, claim.region, claim.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _wrong(message: str) -> ApiError:
    return ApiError("InvalidSignatureException", message, 403)

"""Proof of who sent a request: Signature Version 4, each signature used once, and the file of keys.

Source: AWS "Signature Version 4 signing process", header signing.  `sign` is for our own commands
and for tests; other clients are the aws CLI and boto3.

A server must act only on what was signed.  So every header that is signed or read here may occur
once, holds printable ASCII, and is read from the mapping that was verified.

Signature Version 4 alone takes a captured request again for as long as its time is recent.  Here:

- Calls that only read (Describe..., List...) are answered again.  boto3 signs two equal calls
  within a second with one signature, so they look like a replay. They change nothing.
- A call that changes something is carried out once per signature. A repeat is refused with AWS's
  error for a call that comes while an equal one is in progress. That is ResourceInUse for
  CreateCluster, ConflictException for others. boto3 and the aws CLI do not retry these errors.
- A client that makes an equal call within the same second signs it alike.  For `RETRY_SECONDS` such
  a repeat gets ThrottlingException: boto3 and the aws CLI retry by themselves, with a new
  signature.
- A call that was refused or failed has changed nothing, and clients repeat it.  Its signature is
  valid again for `RETRY_SECONDS`. A later retry has another signature by the client's clock.
- A signature older than this server is refused for calls that change something: an earlier server
  of this address may have carried it out.
- Memory is bounded for each key.  While it is full, calls of that key that change something are
  refused with ThrottlingException, which clients retry.  No signature is forgotten early.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from unbroken.errors import SpecError

from .errors import ClusterApiError, conflict, in_use

ALGORITHM = "AWS4-HMAC-SHA256"
SERVICE = "sagemaker"
"""Signing name of the service (reference section 1.1)."""
SKEW_SECONDS = 300
"""AWS takes a request whose clock is that far off."""
DATE_FORMAT = "%Y%m%dT%H%M%SZ"
STAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z")
NEEDED = ("host", "x-amz-date", "x-amz-target")
"""Headers that must be signed: the server, the time and the operation."""
CONTENT_HASH, SECURITY_TOKEN = "x-amz-content-sha256", "x-amz-security-token"
READ = frozenset(
    {"authorization", "content-encoding", "content-type", CONTENT_HASH, SECURITY_TOKEN, *NEEDED}
)
"""Headers that the server reads; a request with two of one name is refused."""
PRINTABLE = re.compile(r"[\t\x20-\x7e]*")
HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+){0,5}")
"""Becomes a part of ARNs.  Any region may be named: this server stands for all of them."""
REGION_CHARACTERS = 32
AUTHORIZATION = re.compile(
    rf"{ALGORITHM} +Credential=([^,\s]+), *SignedHeaders=([^,\s]+), *Signature=([0-9a-f]{{64}})"
)


@dataclass(frozen=True, slots=True)
class Credential:
    """A key that may call; temporary keys have a `token` as well."""

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
class SignatureClaim:
    """Contents of the Authorization header."""

    key_id: str
    date: str
    region: str
    service: str
    signed: tuple[str, ...]
    signature: str
    at: float
    """Time of the signature by the client's clock, in seconds since the epoch."""

    @property
    def scope(self) -> str:
        """Scope in which the signature is valid."""
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def headers_of(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name, without repeated ones that nobody signed or reads.

    ApiError for a header that is read but repeated, and for one that is not printable ASCII.
    """
    result: dict[str, str] = {}
    repeated = set()
    for name, value in items:
        lower = name.lower()
        if lower in result:
            repeated.add(lower)
        result[lower] = value
    for name in sorted(READ & result.keys()):
        if name in repeated:
            raise _wrong(f"The header {name} must be sent once")
        if PRINTABLE.fullmatch(result[name]) is None:
            raise _wrong(f"The header {name} must hold printable ASCII only")
    # A signed header that was repeated is then missing, and its request refused.
    return {name: value for name, value in result.items() if name not in repeated}


def verify(message: Message, credentials: Mapping[str, Credential], now: float) -> SignatureClaim:
    """Return the identity that signed the request; `credentials` by key id, `now` in seconds since
    the epoch.

    ApiError as AWS would answer, without a hint at what the right signature is.
    """
    claim = admit(message.headers, credentials, now)
    verify_body(message, claim, credentials[claim.key_id])
    return claim


def admit(
    headers: Mapping[str, str], credentials: Mapping[str, Credential], now: float
) -> SignatureClaim:
    """Check what can be checked before the body is read: key, scope and time.  ApiError."""
    claim = read(headers)
    known = credentials.get(claim.key_id)
    if known is None:
        raise _unknown()
    token = headers.get(SECURITY_TOKEN, "")
    if not hmac.compare_digest(token.encode(), known.token.encode()):
        raise _unknown()
    if abs(now - claim.at) > SKEW_SECONDS:
        said = datetime.fromtimestamp(claim.at, UTC).strftime(DATE_FORMAT)
        ours = datetime.fromtimestamp(now, UTC).strftime(DATE_FORMAT)
        word = "expired" if claim.at < now else "not yet current"
        raise _wrong(f"Signature {word}: {said} is more than {SKEW_SECONDS} s off {ours}")
    return claim


def verify_body(message: Message, claim: SignatureClaim, credential: Credential) -> None:
    """Check the signature over headers and body.  ApiError."""
    wanted = _signature(message, claim, credential.secret)
    if not hmac.compare_digest(wanted, claim.signature):
        raise _wrong(
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )
    said = message.headers.get(CONTENT_HASH)
    if said is not None and said != hashlib.sha256(message.body).hexdigest():
        raise _wrong(
            f"{CONTENT_HASH} must be the SHA-256 of the body: neither unsigned nor streamed "
            "payloads are taken"
        )


def read(headers: Mapping[str, str]) -> SignatureClaim:
    """The claim of the Authorization header; ApiError where there is none that can be read."""
    said = headers.get("authorization")
    if said is None:
        raise ClusterApiError(
            "MissingAuthenticationTokenException", "Request is missing Authentication Token", 403
        )
    match = AUTHORIZATION.fullmatch(said.strip())
    parts = match[1].split("/") if match is not None else []
    if match is None or len(parts) < 5 or parts[-1] != "aws4_request":
        raise ClusterApiError(
            "IncompleteSignatureException",
            f"Authorization header requires '{ALGORITHM} Credential=KEY/DATE/REGION/{SERVICE}/"
            "aws4_request, SignedHeaders=..., Signature=...'",
            403,
        )
    date, region, service = parts[-4:-1]
    signed = tuple(match[2].split(";"))
    _check_signed(signed, headers)
    if service != SERVICE:
        raise _wrong(f"Credential should be scoped to correct service: '{SERVICE}'.")
    if len(region) > REGION_CHARACTERS or REGION.fullmatch(region) is None:
        raise _wrong("Credential should be scoped to a valid region, such as us-west-2.")
    at = _signed_at(headers["x-amz-date"], date)
    return SignatureClaim("/".join(parts[:-4]), date, region, service, signed, match[3], at)


def _check_signed(signed: tuple[str, ...], headers: Mapping[str, str]) -> None:
    if list(signed) != sorted(set(signed)) or not all(map(HEADER_NAME.fullmatch, signed)):
        raise _wrong("SignedHeaders must be names in lower case, sorted, each once")
    missing = [name for name in NEEDED if name not in signed]
    absent = [name for name in signed if name not in headers]
    if missing or absent:
        names = ", ".join((*missing, *absent))
        raise _wrong(f"These headers must be signed and sent, each once: {names}")
    if not all(PRINTABLE.fullmatch(headers[name]) for name in signed):
        raise _wrong("Signed headers must hold printable ASCII only")


def sign(message: Message, credential: Credential, region: str, now: float) -> dict[str, str]:
    """The headers to send: those of the message, its date and its signature."""
    stamp = datetime.fromtimestamp(now, UTC).strftime(DATE_FORMAT)
    headers = {**message.headers, "x-amz-date": stamp}
    if credential.token:
        headers["x-amz-security-token"] = credential.token
    signed = tuple(sorted(headers))
    claim = SignatureClaim(credential.key_id, stamp[:8], region, SERVICE, signed, "", now)
    full = Message(message.method, message.path, message.query, headers, message.body)
    signature = _signature(full, claim, credential.secret)
    headers["authorization"] = (
        f"{ALGORITHM} Credential={claim.key_id}/{claim.scope}, "
        f"SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return headers


def _signed_at(stamp: str, date: str) -> float:
    """Seconds since the epoch."""
    result = None
    if STAMP.fullmatch(stamp) is not None:
        with suppress(ValueError):
            result = datetime.strptime(stamp, DATE_FORMAT).replace(tzinfo=UTC)
    if result is None:
        raise ClusterApiError(
            "IncompleteSignatureException",
            f"Date must be in ISO-8601 'basic format'. Got '{stamp[:40]}'.",
            403,
        )
    if stamp[:8] != date:
        raise _wrong("Date in Credential scope does not match YYYYMMDD from the date of the header")
    return result.timestamp()


def _signature(message: Message, claim: SignatureClaim, secret: str) -> str:
    # The server takes the path / without a query only, so neither needs to be normalized.
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


def _unknown() -> ClusterApiError:
    text = "The security token included in the request is invalid."
    return ClusterApiError("UnrecognizedClientException", text, 403)


def _wrong(message: str) -> ClusterApiError:
    return ClusterApiError("InvalidSignatureException", message, 403)


KEPT_SECONDS = 2.0 * SKEW_SECONDS
"""A signature of a clock that is `SKEW_SECONDS` ahead is valid for that long."""
RETRY_SECONDS = 2.0
"""A client signs in whole seconds: an equal signature arrives within one second and its journey."""
NEXT_SECOND = 1.0
"""Seconds until the clock that signed a call shows another second."""
KEPT_MAX = 10_000
"""Signatures kept of one key: 16 changes a second for ten minutes, about 2 MB."""
READS = ("Describe", "List")


@dataclass(slots=True)
class _Use:
    first: float
    is_done: bool = True


class SameSecondError(ClusterApiError):
    """A repeat so soon that it may be a second call of an honest client.

    Answer it after `NEXT_SECOND`: the client's retry has another signature then.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(
            "ThrottlingException",
            f"An equal {operation} with the same signature was made in the same second. "
            "Send it again: a signature of the next second is another one.",
        )


class UsedSignatures:
    """Signatures of calls that change something; `since` is when the server started."""

    def __init__(self, since: float) -> None:
        self._since = math.floor(since)
        """Signatures are dated in whole seconds."""
        self._used: dict[str, OrderedDict[str, _Use]] = {}
        """Calls by key id and signature, oldest use first."""

    def take(self, operation: str, claim: SignatureClaim, now: float) -> None:
        """Note that a call is carried out; ApiError where it must not be."""
        if not changes(operation):
            return
        if claim.at < self._since:
            text = "Signature expired: it is older than this server. Sign the request again."
            raise ClusterApiError("InvalidSignatureException", text, 403)
        used = self._used.setdefault(claim.key_id, OrderedDict())
        while used and next(iter(used.values())).first <= now - KEPT_SECONDS:
            used.popitem(last=False)
        use = used.get(claim.signature)
        if use is not None:
            if now - use.first > RETRY_SECONDS or (use.is_done and operation == "CreateCluster"):
                raise _refusal(operation)
            if use.is_done:
                raise SameSecondError(operation)
            use.is_done = True
            return
        if len(used) >= KEPT_MAX:
            text = f"More than {KEPT_MAX} changes with one key within {KEPT_SECONDS:.0f} s"
            raise ClusterApiError("ThrottlingException", text)
        used[claim.signature] = _Use(now)

    def give_back(self, operation: str, claim: SignatureClaim) -> None:
        """Note that the call that `take` let through was refused or has failed."""
        if changes(operation):
            self._used[claim.key_id][claim.signature].is_done = False


def changes(operation: str) -> bool:
    """True if an operation may change something."""
    return not operation.startswith(READS)


def _refusal(operation: str) -> ClusterApiError:
    text = (
        f"This very {operation} was made already: its signature has been used. "
        "Send the request anew if you mean it again."
    )
    return in_use(text) if operation == "CreateCluster" else conflict(text)


KEY, SECRET, TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"


def credentials_text(credential: Credential) -> str:
    """The content of a file with one key, as `read_credentials` takes it."""
    return f"[default]\n{KEY} = {credential.key_id}\n{SECRET} = {credential.secret}\n"


def read_credentials(path: Path) -> dict[str, Credential]:
    """Credentials by key id; SpecError where the file has none or cannot be read.

    Errors quote no line of the file: it holds secrets.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the credentials of the cluster API: {error}") from error
    except configparser.Error as error:
        raise SpecError(f"{path}: not in the form of ~/.aws/credentials") from error
    result = {}
    for name in parser.sections():
        section = parser[name]
        key, secret = section.get(KEY, ""), section.get(SECRET, "")
        if not key or not secret:
            raise SpecError(f"{path}: [{name}] needs {KEY} and {SECRET}")
        result[key] = Credential(key, secret, section.get(TOKEN, ""))
    if not result:
        raise SpecError(f"{path}: no credentials; write [NAME], {KEY} = ... and {SECRET} = ...")
    return result

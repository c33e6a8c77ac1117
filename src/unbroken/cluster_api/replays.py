"""Signatures that were used: a request that changes something is carried out once.  Pure.

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

import math
from collections import OrderedDict
from dataclasses import dataclass

from .errors import ApiError, conflict, in_use
from .signatures import SKEW_SECONDS, Claim

KEPT_SECONDS = 2.0 * SKEW_SECONDS
"""A signature of a clock that is `SKEW_SECONDS` ahead is valid for that long."""
RETRY_SECONDS = 2.0
"""A client signs in whole seconds: an equal signature arrives within one second and its journey."""
NEXT_SECOND = 1.0
"""Until the clock that signed a call shows another second."""
KEPT_MAX = 10_000
"""Signatures kept of one key: 16 changes a second for ten minutes, about 2 MB."""
READS = ("Describe", "List")


@dataclass(slots=True)
class _Use:
    first: float
    is_done: bool = True


class SameSecondError(ApiError):
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
        """By key id and signature, oldest use first."""

    def take(self, operation: str, claim: Claim, now: float) -> None:
        """Note that a call is carried out; ApiError where it must not be."""
        if not changes(operation):
            return
        if claim.at < self._since:
            text = "Signature expired: it is older than this server. Sign the request again."
            raise ApiError("InvalidSignatureException", text, 403)
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
            raise ApiError("ThrottlingException", text)
        used[claim.signature] = _Use(now)

    def give_back(self, operation: str, claim: Claim) -> None:
        """Note that the call that `take` let through was refused or has failed."""
        if changes(operation):
            self._used[claim.key_id][claim.signature].is_done = False


def changes(operation: str) -> bool:
    """True if an operation may change something."""
    return not operation.startswith(READS)


def _refusal(operation: str) -> ApiError:
    text = (
        f"This very {operation} was made already: its signature has been used. "
        "Send the request anew if you mean it again."
    )
    return in_use(text) if operation == "CreateCluster" else conflict(text)

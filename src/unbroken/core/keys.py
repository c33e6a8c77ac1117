"""Every key of the operator, derived from its master key (HMAC-SHA256, as HKDF expands one).

A derived key says nothing of the master key or of another derived key.  So each operator that has
the master key knows the key of every job, and keeps none of them.
"""

from __future__ import annotations

import hmac

MASTER_BYTES = 32
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256 (FIPS 186-4, D.1.2.3)."""
_VERSION = b"unbroken/v1"
_NAME_CHARACTERS = 20
"""Characters of a Secret's name: 80 bits, which nobody guesses without the master key."""
_JOB_NAME_MAX = 200
"""Characters of the job's name in the name of its Secret, which has at most 253."""


def derive(master: bytes, purpose: str, subject: str = "", block: int = 1) -> bytes:
    """32 bytes for one purpose and one subject, such as the uid of a job."""
    if len(master) != MASTER_BYTES:
        raise ValueError(f"a master key has {MASTER_BYTES} bytes, not {len(master)}")
    parts = (_VERSION, purpose.encode(), subject.encode(), bytes((block,)))
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(master, message, "sha256")


def job_key(master: bytes, uid: str) -> bytes:
    """The key that the operator and the agents of one job share."""
    return derive(master, "job", uid)


def job_secret_name(master: bytes, name: str, uid: str) -> str:
    """The name of the Secret that gives a job's pods its key.

    Another job, another uid or another master key gives another name.  So a Secret of somebody
    else is never taken for it, and the name in a pod says which key the pod has.
    """
    code = derive(master, "name of a job's secret", uid).hex()[:_NAME_CHARACTERS]
    return f"{name[:_JOB_NAME_MAX].rstrip('.-')}-agent-{code}"


def authority_number(master: bytes) -> int:
    """The private key, on the curve P-256, of the authority that signs the webhook's certificates.

    Of 512 bits, so that the remainder is as good as even (FIPS 186-4, B.4.1).
    """
    bits = b"".join(derive(master, "webhook authority", block=block) for block in (1, 2))
    return int.from_bytes(bits, "big") % (P256_ORDER - 1) + 1

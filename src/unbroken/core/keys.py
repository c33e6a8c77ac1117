"""Derivation of every key of the operator from its master key (HMAC-SHA256, as in HKDF's expand
step).

A derived key reveals nothing about the master key or another derived key. So each operator with the
master key can derive the key of every job, and stores none of them.
"""

from __future__ import annotations

import hmac

MASTER_BYTES = 32
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256 (FIPS 186-4, D.1.2.3)."""
_VERSION = b"unbroken/v1"
_NAME_CHARACTERS = 20
"""Characters in a Secret's name that come from the key: 80 bits, which cannot be guessed without
the master key."""
_JOB_NAME_MAX = 200
"""Characters of the job's name in the name of its Secret, which may have at most 253."""


def derive(master: bytes, purpose: str, subject: str = "", block: int = 1) -> bytes:
    """Return 32 bytes for one purpose and one subject, such as the uid of a job."""
    if len(master) != MASTER_BYTES:
        raise ValueError(f"a master key has {MASTER_BYTES} bytes, not {len(master)}")
    parts = (_VERSION, purpose.encode(), subject.encode(), bytes((block,)))
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(master, message, "sha256")


def job_key(master: bytes, uid: str) -> bytes:
    """Return the key that the operator and the agents of one job share."""
    return derive(master, "job", uid)


def job_secret_name(master: bytes, name: str, uid: str) -> str:
    """Return the name of the Secret that gives a job's pods its key.

    Another job, another uid or another master key gives another name. So a Secret of another owner
    is never mistaken for it, and the name in a pod identifies its key.
    """
    code = derive(master, "name of a job's secret", uid).hex()[:_NAME_CHARACTERS]
    return f"{name[:_JOB_NAME_MAX].rstrip('.-')}-agent-{code}"


def authority_number(master: bytes) -> int:
    """Return the private key, on the curve P-256, of the authority that signs the webhook's
    certificates.

    It is derived from 512 bits, so that the remainder is nearly uniform (FIPS 186-4, B.4.1).
    """
    bits = b"".join(derive(master, "webhook authority", block=block) for block in (1, 2))
    return int.from_bytes(bits, "big") % (P256_ORDER - 1) + 1

"""The operator's master key: a file of 64 hexadecimal digits, in a cluster the file of a Secret.

The operator may create Secrets and may not read them. It makes the Secret if there is none, and
reads it as the file that the kubelet mounts.
"""

from __future__ import annotations

import binascii
import os
import secrets
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from unbroken.core.keys import MASTER_BYTES
from unbroken.errors import SpecError
from unbroken.kube.backoff import persist
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import pause
from unbroken.log_lines import Log

log = Log(__name__)

ENTRY = "key"
"""Name of the entry of the Secret, and of the file."""
POLL_SECONDS = 1.0
FILE_BYTES_MAX = 4096
OTHERS = 0o007
"""Mode bits of users who are neither the file's owner nor in its group."""
HINT = "make one with: openssl rand -hex 32"


class KeySecret(NamedTuple):
    """The Secret that holds the master key."""

    namespace: str
    name: str


def read_key(path: Path) -> bytes | None:
    """Return the key in a file; None: there is no file, or it is empty. Raises SpecError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(FILE_BYTES_MAX).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"cannot read the operator's key in {path}: {error.strerror}") from error
    if not text:
        return None
    if mode & OTHERS:
        raise SpecError(f"everybody may read the operator's key in {path}: run chmod 600 {path}")
    try:
        key = binascii.unhexlify(text)
    except ValueError:
        key = b""
    if len(key) != MASTER_BYTES:
        raise SpecError(f"{path} must hold {2 * MASTER_BYTES} hexadecimal digits; {HINT}")
    return key


def kept_key(path: Path) -> bytes:
    """Return the key in a file, which is made (mode 0600) if there is none. Raises SpecError."""
    key = read_key(path)
    if key is not None:
        return key
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(MASTER_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
            log.info("operator's key made", file=path)
        except FileExistsError:
            log.info("operator's key was made by another program", file=path)
        finally:
            draft.unlink()
    except OSError as error:
        raise SpecError(f"cannot make the operator's key in {path}: {error.strerror}") from error
    made = read_key(path)
    if made is None:
        raise SpecError(f"the operator's key in {path} is empty; remove the file, or {HINT}")
    return made


async def mounted_key(client: KubeClient, path: Path, secret: KeySecret) -> bytes:
    """Return the key in a file that the kubelet makes of a Secret; without the file, of a new
    Secret.

    The operator that made the Secret knows the key. The others wait until the kubelet has the file,
    which takes up to 90 s. Raises SpecError; ApiRefusal if it may not create Secrets.
    """
    result = read_key(path)
    if result is not None:
        return result
    key = secrets.token_bytes(MASTER_BYTES)
    metadata = {"name": secret.name, "labels": {"app.kubernetes.io/managed-by": "unbroken"}}
    body = {
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": {ENTRY: key.hex()},
    }
    collection = f"api/v1/namespaces/{quote(secret.namespace)}/secrets"
    title = f"{secret.namespace}/{secret.name}"
    if await persist("make the operator's key", lambda: client.create_if_absent(collection, body)):
        log.info("operator's key made", secret=title)
        return key
    log.info("wait for the kubelet to mount the operator's key", secret=title, file=path)
    while (result := read_key(path)) is None:
        await pause(POLL_SECONDS)
    log.info("operator's key read", file=path)
    return result

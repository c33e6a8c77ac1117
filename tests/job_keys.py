"""Keys of jobs, as tests find them in a cluster or make them up."""

from __future__ import annotations

import base64
from typing import Any

from unbroken.core.keys import MASTER_BYTES
from unbroken.operator.jobs.pods import KEY_ENTRY, KEY_VOLUME

MASTER = bytes(range(MASTER_BYTES))
"""An operator's key."""


def secret_of(pod: dict[str, Any]) -> str:
    """The name of the Secret from which a pod has its job's key."""
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    name: str = volumes[KEY_VOLUME]["secret"]["secretName"]
    return name


def key_in(secret: dict[str, Any]) -> bytes:
    """The key that a Secret holds."""
    return bytes.fromhex(base64.b64decode(secret["data"][KEY_ENTRY]).decode())

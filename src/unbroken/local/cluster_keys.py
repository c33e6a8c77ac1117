"""The key of a local cluster's cluster API: made at the first start, kept in the directory.

The loopback address is open to every user of the machine; the key is readable by its owner only.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from unbroken.cluster_api.credentials import credentials_text
from unbroken.cluster_api.signatures import Credential
from unbroken.local.apiserver.access import write_private

from .state import ClusterOptions, Paths

KEY_ID_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
KEY_ID_PREFIX, KEY_ID_RANDOM = "AKIA", 16
"""An access key id of AWS: the prefix of long-term keys and 16 letters and digits."""
SECRET_BYTES = 30
"""Bytes of a secret: as many as AWS has, which makes 40 characters; here none that a shell must
quote."""


def credentials_file(paths: Paths, options: ClusterOptions) -> Path:
    """The file of the keys that may call the cluster API; a key is made if there is none."""
    if options.cluster_api_credentials:
        return Path(options.cluster_api_credentials)
    path = paths.cluster_api_credentials
    if path.exists():
        path.chmod(0o600)
        return path
    letters = (secrets.choice(KEY_ID_LETTERS) for _ in range(KEY_ID_RANDOM))
    made = Credential(KEY_ID_PREFIX + "".join(letters), secrets.token_urlsafe(SECRET_BYTES))
    write_private(path, credentials_text(made).encode())
    return path

"""Ray's own token: who has it may run programs on a RayCluster.  Pure.

Variables and the key of the Secret are those of KubeRay 1.7 for `authOptions`. The name is another
one: KubeRay names the Secret as the RayCluster, and a user may have one of that name.
"""

from __future__ import annotations

import base64
import hmac

from unbroken.spec.job_kinds import RAY_CLUSTER

from .values import Object

TOKEN = "auth_token"
"""Key of the Secret."""
VARIABLES = "RAY_AUTH_"
"""Beginning of the names of variables by which Ray finds its token."""
MODE = "RAY_AUTH_MODE"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
"""Variable that names a file with the token; RAY_AUTH_TOKEN would overrule it."""


def token_name(cluster: str) -> str:
    """Return the name of the Secret with the token of a RayCluster."""
    return f"{cluster}-ray-token"


def token_of(key: str, uid: str) -> str:
    """Return the token of the RayCluster of this uid; it does not tell the local cluster's key."""
    return hmac.new(key.encode(), f"ray/{uid}".encode(), "sha256").hexdigest()


def token_body(cluster: str, uid: str, token: str) -> Object:
    """Return the Secret with the token, to be created or merged."""
    owner = RAY_CLUSTER.owner_reference(cluster, uid)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": token_name(cluster), "ownerReferences": [owner]},
        "data": {TOKEN: base64.b64encode(token.encode()).decode()},
    }

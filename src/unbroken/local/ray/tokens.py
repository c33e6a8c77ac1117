"""Tokens of Ray for the programs of the local cluster that use a RayCluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lightkube.config.kubeconfig import SingleConfig

from unbroken.errors import WorldError
from unbroken.local.listeners import strangers
from unbroken.operator.resume.ray_dashboard import RefusedError, Tokens

from .decisions.access import token_of


def key_of_tokens(config: SingleConfig) -> str:
    """Return the secret of the local cluster from which the tokens of its RayClusters follow."""
    key = (config.user and config.user.token) or ""
    if not key:
        raise WorldError("the kubeconfig of the local cluster has no token: Ray's would be known")
    return key


def ray_tokens(config: SingleConfig) -> Tokens:
    """Return the tokens of all RayClusters, each for its own head only."""
    key = key_of_tokens(config)

    def token(cluster: Mapping[str, Any], url: str) -> str:
        place = urlsplit(url)
        assert place.hostname is not None
        assert place.port is not None
        pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        others = strangers(place.hostname, place.port, pod)
        if others:
            raise RefusedError(
                f"user {others[0]} of this machine listens at {place.netloc}, and not Ray alone: "
                "end that program, then delete the head's pod"
            )
        return token_of(key, cluster["metadata"]["uid"])

    return token

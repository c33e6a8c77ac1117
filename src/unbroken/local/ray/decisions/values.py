"""Values by which a RayCluster is decided: orders, Ray's token, its autoscaler. Pure.

Who has Ray's token may run programs on a RayCluster. Variables and the key of the Secret are those
of KubeRay 1.7 for `authOptions`. The name is another one: KubeRay names the Secret as the
RayCluster, and a user may have one of that name.

Ray's own autoscaler runs in the pod of the head, as KubeRay 1.7 runs it
(`BuildAutoscalerContainer` of `common/pod.go`). It reads the RayCluster and its pods from the API
server, and patches `replicas` and `scaleStrategy.workersToDelete` of worker groups. These things
differ. It gets the address of the GCS, whose port is not 6379, and a free port for its metrics. The
local cluster has one token and no service accounts. So a Secret with this token is mounted where
Ray looks for that of an account. It also names the address of the API server.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.spec.job_kinds import RAY_CLUSTER

Object = dict[str, Any]

HEAD, WORKER = "head", "worker"
"""Values of the label ray.io/node-type."""


@dataclass(frozen=True, slots=True)
class RayPod:
    """A pod of a RayCluster."""

    name: str
    uid: str
    node_type: str
    group: str
    """The worker group; `headgroup` for the head."""
    address: str = ""
    """The pod's IP address; empty: it has none yet."""
    phase: str = "Pending"
    is_leaving: bool = False
    is_ready: bool = False
    why_not_ready: tuple[str, str] = ("", "")
    """Reason and message of the pod's condition Ready."""
    exit_code: int | None = None
    """Exit code of the Ray container; None: it has not ended."""
    restart_policy: str = "Always"
    head_uid: str = ""
    """Uid of the head that a worker joined."""


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """All that is known of a RayCluster."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    is_leaving: bool = False
    pods: tuple[RayPod, ...] = ()
    service: Mapping[str, Any] | None = None
    """The head's service; None: it does not exist."""

    @property
    def head(self) -> RayPod | None:
        """The head's pod; None: it does not exist."""
        return next((pod for pod in self.pods if pod.node_type == HEAD), None)

    def workers(self, group: str) -> list[RayPod]:
        """List the pods of a worker group, by name."""
        result = (pod for pod in self.pods if pod.node_type == WORKER and pod.group == group)
        return sorted(result, key=lambda pod: pod.name)


@dataclass(frozen=True, slots=True)
class RecordClusterEvent:
    """Record an event on the RayCluster."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create a pod or service, then record the event."""

    collection: str
    """`pods` or `services`."""
    body: Mapping[str, Any]
    then: RecordClusterEvent
    failure: str
    """Reason of the event for a refusal."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod of this uid, then record the event."""

    name: str
    uid: str
    then: RecordClusterEvent


Order = Create | DeletePod


@dataclass(frozen=True, slots=True)
class Plan:
    """Orders, and the status to write after they are carried out."""

    orders: tuple[Order, ...] = ()
    status: Mapping[str, Any] | None = None
    """The whole new status; None: it is up to date."""


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


NAME = "autoscaler"
FIELD = "enableInTreeAutoscaling"
ACCESS = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Folder with `token` and `ca.crt` (`IN_CLUSTER_TOKEN_PATH` of Ray's `node_provider.py`)."""
RESOURCES = {"cpu": "500m", "memory": "512Mi"}
"""Requests and limits of the autoscaler (KubeRay's)."""
REPLACED = {"image": str, "imagePullPolicy": str, "resources": dict, "securityContext": dict}
ADDED = {"env": list, "envFrom": list, "volumeMounts": list}
"""Fields of `autoscalerOptions` that replace those of the container, or are added to them."""


def is_autoscaled(spec: Mapping[str, Any]) -> bool:
    """True if Ray's autoscaler decides on the workers of a RayCluster."""
    return bool(spec.get(FIELD))


def wrong_options(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield fields of `autoscalerOptions` that cannot be used, and what each must be."""
    options = spec.get("autoscalerOptions") or {}
    words = {str: "text", dict: "an object", list: "a list"}
    for field, kind in {**REPLACED, **ADDED}.items():
        if options.get(field) is not None and not isinstance(options[field], kind):
            yield field, f"must be {words[kind]}"


def access_name(cluster: str) -> str:
    """Return the name of the Secret with the autoscaler's token."""
    return f"{cluster}-{NAME}"


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the API server from a pod."""

    host: str
    port: str
    token: str
    authority: str
    """Certificate that the API server has, as PEM in base64."""


def access_body(cluster: str, uid: str, access: Access) -> Object:
    """Return this Secret, to be created or merged."""
    owner = RAY_CLUSTER.owner_reference(cluster, uid)
    texts = {"token": access.token, "host": access.host, "port": access.port}
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": access_name(cluster), "ownerReferences": [owner]},
        "data": {**data, "ca.crt": access.authority},
    }


def add_autoscaler(
    pod: Object, spec: Mapping[str, Any], cluster: str, address: Object, gcs: str, port: int
) -> None:
    """Add the container to the pod of a head, whose first container is complete.

    `address`: the variable with the pod's address; `gcs`: where the GCS is; `port`: of metrics.
    """
    ray = pod["containers"][0]
    options = {
        key: value
        for key, value in (spec.get("autoscalerOptions") or {}).items()
        if isinstance(value, REPLACED.get(key) or ADDED.get(key) or ())
    }
    tokens = [one for one in ray["env"] if one["name"].startswith(VARIABLES)]
    container: Object = {
        "name": NAME,
        "image": ray.get("image", ""),
        "command": ["/bin/bash", "-c", "--"],
        "args": [f"exec ray kuberay-autoscaler {_words(gcs)}"],
        "env": [address, *_variables(access_name(cluster), port), *tokens],
        "resources": {"requests": RESOURCES, "limits": RESOURCES},
        "volumeMounts": [{"name": NAME, "mountPath": ACCESS, "readOnly": True}],
    }
    # It writes its log where Ray's dashboard looks for it.
    container["volumeMounts"] += [
        mount for mount in ray["volumeMounts"] if mount["mountPath"].rstrip("/") == "/tmp/ray"
    ]
    container |= {key: value for key, value in options.items() if key in REPLACED}
    for key in ADDED.keys() & options.keys():
        container[key] = [*container.get(key, ()), *options[key]]
    pod["containers"].append(container)
    secret = {"name": NAME, "secret": {"secretName": access_name(cluster)}}
    pod.setdefault("volumes", []).append(secret)


def _words(gcs: str) -> str:
    named = "--cluster-name $(RAY_CLUSTER_NAME) --cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
    return f"{named} --gcs-address {gcs}"


def _variables(secret: str, port: int) -> list[Object]:
    keys = {"KUBERNETES_SERVICE_HOST": "host", "KUBERNETES_SERVICE_PORT_HTTPS": "port"}
    fields = {
        "RAY_CLUSTER_NAME": f"metadata.labels['{RAY_CLUSTER.pod_label}']",
        "RAY_CLUSTER_NAMESPACE": "metadata.namespace",
        "RAY_HEAD_POD_NAME": "metadata.name",
    }
    values = {
        "KUBERAY_CRD_VER": "v1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_METRIC_PORT": str(port),
    }
    sources: Object = {name: {"fieldRef": {"fieldPath": path}} for name, path in fields.items()}
    sources |= {name: {"secretKeyRef": {"name": secret, "key": key}} for name, key in keys.items()}
    found = [{"name": name, "valueFrom": source} for name, source in sources.items()]
    return [*found, *({"name": name, "value": value} for name, value in values.items())]

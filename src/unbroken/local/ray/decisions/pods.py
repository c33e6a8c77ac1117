"""The pods and the service of a RayCluster, as KubeRay 1.7 makes them (`common/pod.go`,
`common/service.go`).  Pure.

All pods share one machine, so these things differ.  Every Ray process listens at the address of its
pod only, or at a port that is free.  The port of the GCS is chosen for each cluster, because Ray's
GCS listens at all addresses.  Workers get the address of the head and not its name.  `/tmp/ray` is
a volume of each pod.  Hooks that run `ray stop` are left out: it would stop the Ray processes of
all pods.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from hashlib import sha256
from typing import Any

from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.kube.quantity import parse_quantity
from unbroken.spec.job_kinds import RAY_CLUSTER
from unbroken.spec.keys import RAY_HEAD

from .values import (
    HEAD,
    MODE,
    TOKEN,
    TOKEN_FILE,
    WORKER,
    ClusterPicture,
    Object,
    add_autoscaler,
    is_autoscaled,
    token_name,
)

HEAD_GROUP = "headgroup"
GCS_PORTS = ("gcs-server", "gcs")
"""Names of the port of the GCS; the first is KubeRay's own."""
GCS_PORT, DASHBOARD_PORT = 6379, 8265
DEFAULT_PORTS = {
    "gcs-server": GCS_PORT,
    "dashboard": DASHBOARD_PORT,
    "client": 10001,
    "serve": 8000,
}
"""Ports of the head's service where the Ray container names none."""
POD_IP = "UNBROKEN_POD_IP"
ADDRESS = {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
HERE = f"$({POD_IP})"
"""The address of the pod, in commands and variables of its container."""
AGENT_PORT = "dashboard-agent-listen-port"
"""Parameter of `ray start`.  An agent listens at 127.0.0.1, too, so no two may have one port."""
RAYLET_HEALTH = "/api/local_raylet_healthz"
ANY_ADDRESS = ("0.0.0.0", "::", "")
SWITCHES_WITH_VALUES = ("log-color", "include-dashboard")
"""Parameters of `ray start` whose values true and false are written out."""
OBJECT_STORE_SHARE = Decimal("0.3")
"""Share of a container's memory that Ray takes for objects where nothing is said."""
OBJECT_STORE_MIN = 80 * 1024 * 1024
"""Bytes of objects below which Ray does not start."""
SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
SUFFIX_LENGTH = 5


def service_name(cluster: str) -> str:
    """Return the name of the head's service."""
    return f"{cluster}-head-svc"


def pod_name(cluster: ClusterPicture, group: str, slot: int) -> str:
    """Return the name of the pod in a slot of its group: always the same, so none is made twice."""
    digest = sha256(f"{cluster.uid}/{group}/{slot}".encode()).digest()
    suffix = "".join(SUFFIX_LETTERS[one % len(SUFFIX_LETTERS)] for one in digest[:SUFFIX_LENGTH])
    middle = HEAD if group == HEAD_GROUP else f"{group}-{WORKER}"
    return f"{cluster.name}-{middle}"[:50].rstrip("-").lower() + f"-{suffix}"


def labels_of(cluster: str, node_type: str, group: str) -> dict[str, str]:
    """Return the labels of a pod; those of the head are the selector of its service, too."""
    return {
        "app.kubernetes.io/created-by": "kuberay-operator",
        "app.kubernetes.io/name": "kuberay",
        RAY_CLUSTER.pod_label: cluster,
        "ray.io/group": group,
        "ray.io/identifier": f"{cluster}-{node_type}"[:63],
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node_type,
    }


def service_body(cluster: ClusterPicture, free_port: int) -> Object:
    """Return the service of the head.  `free_port`: the GCS's, unless the spec names one."""
    head = cluster.spec["headGroupSpec"]
    given = str((head.get("rayStartParams") or {}).get("port"))
    gcs = whole_number(given, 1, PORT_MAX) or free_port
    container = head["template"]["spec"]["containers"][0]
    named = {
        item["name"]: item["containerPort"]
        for item in container.get("ports") or ()
        if "name" in item
    }
    ports = [
        {
            "name": name,
            "port": port,
            "targetPort": gcs if name in GCS_PORTS else port,
            "appProtocol": "tcp",
        }
        for name, port in (named or DEFAULT_PORTS).items()
        if name != "metrics"
    ]
    if not any(item["name"] in GCS_PORTS for item in ports):
        ports.append(
            {"name": GCS_PORTS[0], "port": GCS_PORT, "targetPort": gcs, "appProtocol": "tcp"}
        )
    selector = labels_of(cluster.name, HEAD, HEAD_GROUP)
    labels = {key: value for key, value in selector.items() if key != "ray.io/group"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cluster, service_name(cluster.name), labels, {}),
        "spec": {"type": "ClusterIP", "clusterIP": "None", "selector": labels, "ports": ports},
    }


def gcs_port(service: Mapping[str, Any]) -> int:
    """Return the port at which the GCS of a cluster listens, which its service keeps."""
    ports = service["spec"]["ports"]
    return int(next(port["targetPort"] for port in ports if port["name"] in GCS_PORTS))


def head_body(cluster: ClusterPicture, port: int, agent_port: int, metrics_port: int) -> Object:
    """Return the pod of the head, whose GCS, dashboard agent and autoscaler listen at these
    ports."""
    group = cluster.spec["headGroupSpec"]
    given = dict(group.get("rayStartParams") or {})
    host = given.pop("dashboard-host", "")
    fixed = {"head": "true", "port": str(port), AGENT_PORT: str(agent_port)}
    parameters = {"dashboard-host": HERE if host in ANY_ADDRESS else host, **given, **fixed}
    if is_autoscaled(cluster.spec):
        parameters["no-monitor"] = "true"
    body = _pod_body(cluster, group, HEAD_GROUP, 0, parameters)
    container = body["spec"]["containers"][0]
    for item in container.get("ports") or ():
        if item.get("name") in GCS_PORTS:
            item["containerPort"] = port
    added = {"RAY_PORT": str(port), "RAY_ADDRESS": f"{HERE}:{port}"}
    _add_variables(container, added)
    named = str(given.get("dashboard-port"))
    dashboard = whole_number(named, 1, PORT_MAX) or DASHBOARD_PORT
    _probe(container, agent_port, (dashboard, "/api/gcs_healthz"))
    if is_autoscaled(cluster.spec):
        gcs = f"{HERE}:{port}"
        add_autoscaler(body["spec"], cluster.spec, cluster.name, ADDRESS, gcs, metrics_port)
    return body


def worker_body(
    cluster: ClusterPicture, group: Mapping[str, Any], slot: int, agent_port: int
) -> Object:
    """Return a worker's pod, which joins the head; the cluster has a head and its service."""
    head, service = cluster.head, cluster.service
    assert head is not None
    assert service is not None
    port = gcs_port(service)
    address = f"{head.address}:{port}"
    fixed = {"address": address, AGENT_PORT: str(agent_port)}
    parameters = {**(group.get("rayStartParams") or {}), **fixed}
    body = _pod_body(cluster, group, group["groupName"], slot, parameters)
    body["metadata"]["annotations"][RAY_HEAD] = head.uid
    short = service_name(cluster.name)
    long = f"{short}.{cluster.namespace}.svc.cluster.local"
    names = [short, f"{short}.{cluster.namespace}", f"{short}.{cluster.namespace}.svc", long]
    pod = body["spec"]
    aliases = {"ip": head.address, "hostnames": names}
    pod["hostAliases"] = [*(pod.get("hostAliases") or ()), aliases]
    result = {"FQ_RAY_IP": long, "RAY_IP": short}
    for container in pod.get("initContainers") or ():
        _add_variables(container, result)
    container = pod["containers"][0]
    _add_variables(container, {**result, "RAY_PORT": str(port), "RAY_ADDRESS": address})
    _probe(container, agent_port, (agent_port, RAYLET_HEALTH))
    return body


def _pod_body(
    cluster: ClusterPicture,
    group: Mapping[str, Any],
    name: str,
    slot: int,
    parameters: Mapping[str, str],
) -> Object:
    template = copy.deepcopy(dict(group["template"]))
    given, pod = template.get("metadata") or {}, template["spec"]
    node_type = HEAD if name == HEAD_GROUP else WORKER
    fixed = labels_of(cluster.name, node_type, name)
    extra = {**(given.get("labels") or {}), **(group.get("labels") or {})}
    labels = {**extra, **fixed}
    annotations = dict(given.get("annotations") or {})
    container = pod["containers"][0]
    for item in pod["containers"]:
        _leave_out_ray_stop(item)
    start = start_command(parameters, container.get("resources") or {})
    _set_command(container, start, annotations)
    _mount(pod, container, "shared-mem", "/dev/shm", {"medium": "Memory"})
    _mount(pod, container, "ray-tmp", "/tmp/ray", {})
    own: dict[str, str | Object] = {
        "RAY_CLUSTER_NAME": {
            "fieldRef": {"fieldPath": f"metadata.labels['{RAY_CLUSTER.pod_label}']"}
        },
        "RAY_CLOUD_INSTANCE_ID": {"fieldRef": {"fieldPath": "metadata.name"}},
        "RAY_NODE_TYPE_NAME": {"fieldRef": {"fieldPath": "metadata.labels['ray.io/group']"}},
        "KUBERAY_GEN_RAY_START_CMD": start,
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        MODE: "token",
    }
    if not any(one["name"] == TOKEN_FILE for one in container.get("env") or ()):
        own["RAY_AUTH_TOKEN"] = {"secretKeyRef": {"name": token_name(cluster.name), "key": TOKEN}}
    _add_variables(container, own)
    # First, so that the other variables can refer to it.
    container["env"] = [ADDRESS, *container["env"]]
    metadata = _metadata(cluster, pod_name(cluster, name, slot), labels, annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def start_command(given: Mapping[str, str], resources: Mapping[str, Any]) -> str:
    """Return the command that starts Ray in a container of these resources."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    result = {
        **dict(_amounts(limits, requests)),
        # 8080 and worker ports from 10002 on would be the same for all pods of the machine.
        "min-worker-port": "0",
        "max-worker-port": "0",
        **{key: value for key, value in given.items() if key != "metrics-export-port"},
        "node-ip-address": HERE,
        "block": "true",
    }
    return " ".join(("ray start", *_flags(result)))


def _amounts(limits: Mapping[str, Any], requests: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the resources that are passed to `ray start`."""
    cpu, memory = limits.get("cpu") or requests.get("cpu"), limits.get("memory")
    if cpu:
        yield "num-cpus", str(_whole(cpu))
    if memory:
        yield "memory", str(_whole(memory))
        objects = int(parse_quantity(memory) * OBJECT_STORE_SHARE)
        yield "object-store-memory", str(max(objects, OBJECT_STORE_MIN))
    for name, amount in sorted(limits.items()):
        if name.endswith("gpu") and parse_quantity(amount):
            yield "num-gpus", str(_whole(amount))
            return


def _whole(amount: str | int) -> int:
    return int(parse_quantity(amount).to_integral_value(ROUND_CEILING))


def _flags(parameters: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(parameters.items()):
        if value.lower() not in ("true", "false") or name in SWITCHES_WITH_VALUES:
            yield f"--{name}={value}"
        elif value.lower() == "true":
            yield f"--{name}"


def _set_command(container: Object, start: str, annotations: Mapping[str, str]) -> None:
    """Let the container start Ray after its own command, unless that starts Ray itself."""
    own = " ".join((*(container.get("command") or ()), *(container.get("args") or ())))
    is_own = annotations.get("ray.io/overwrite-container-cmd", "").lower() == "true"
    if is_own or "ray start" in own:
        return
    # With exec, Ray gets the signal that ends the pod; a shell would wait for the whole grace.
    whole = f"ulimit -n 65536; exec {start}"
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"{own} && {whole}" if own else whole]


def _leave_out_ray_stop(container: Object) -> None:
    """Drop a preStop hook that would stop the Ray processes of all pods."""
    hooks = container.get("lifecycle") or {}
    if "ray stop" in json.dumps(hooks.get("preStop", "")).replace('", "', " "):
        container["lifecycle"] = {key: hooks[key] for key in hooks if key != "preStop"}


def _mount(pod: Object, container: Object, name: str, path: str, kind: Mapping[str, str]) -> None:
    """Mount an empty volume of the pod's own where the template mounts nothing."""
    mounts = container.setdefault("volumeMounts", [])
    if not any(mount["mountPath"].rstrip("/") == path for mount in mounts):
        pod.setdefault("volumes", []).append({"name": name, "emptyDir": dict(kind)})
        mounts.append({"name": name, "mountPath": path})


def _add_variables(container: Object, added: Mapping[str, str | Object]) -> None:
    """Add variables that the template does not set itself."""
    given = container.setdefault("env", [])
    known = {item["name"] for item in given}
    given += [
        {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
        for name, value in added.items()
        if name not in known
    ]


def _probe(container: Object, agent_port: int, readiness: tuple[int, str]) -> None:
    """Probe Ray's own signs of life where the template has no probes, with KubeRay's times.

    `readiness`: port and path that answer when the pod is ready.  It lives while its agent answers.
    """
    live = {"httpGet": {"port": agent_port, "path": RAYLET_HEALTH}, "initialDelaySeconds": 30}
    times = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 120}
    container.setdefault("livenessProbe", {**live, **times})
    # KubeRay waits for 10 s first and asks every 5 s; here, Ray is up after 5 s.
    port, path = readiness
    ready = {"httpGet": {"port": port, "path": path}, "periodSeconds": 1, "timeoutSeconds": 5}
    container.setdefault("readinessProbe", {**ready, "failureThreshold": 10})


def _metadata(
    cluster: ClusterPicture, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> Object:
    return {
        "name": name,
        "namespace": cluster.namespace,
        "labels": dict(labels),
        "annotations": dict(annotations),
        "ownerReferences": [RAY_CLUSTER.owner_reference(cluster.name, cluster.uid)],
    }


def requests_of(template: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what the containers of a pod request together; limits count where no request is."""
    result: dict[str, Decimal] = {}
    for container in _containers(template):
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, amount in asked.items():
            result[name] = result.get(name, Decimal(0)) + parse_quantity(amount)
    return result


def _containers(template: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return template["spec"].get("containers") or ()

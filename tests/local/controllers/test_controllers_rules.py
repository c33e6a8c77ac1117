"""The controllers' rules as tables: silent nodes, evictions, volumes, addresses, namespaces."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.models.core_v1 import Taint
from lightkube.resources.core_v1 import (
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Service,
)

from unbroken.kube.cache import Key
from unbroken.local.controllers.endpoints import backends, endpoints, slices
from unbroken.local.controllers.inventory import Item, ResourceKind
from unbroken.local.controllers.namespaces import conditions
from unbroken.local.controllers.node_lifecycle import heartbeat, silence, stay, wanted_taints
from unbroken.local.controllers.volumes import Bind, Provision, Wait, bind, directory_name
from unbroken.spec.keys import NOT_READY, UNREACHABLE

Object = dict[str, Any]
NOW = 1_700_000_000.0
SINCE = "2023-11-14T22:13:00Z"  # 20 s before NOW
LATER = "2023-11-14T22:13:10Z"


def node(ready: str, *taints: Object, unschedulable: bool = False) -> Node:
    """Return a node whose Ready condition is `ready`; empty: it has none."""
    states = [{"type": "Ready", "status": ready}] if ready else []
    spec = {"taints": list(taints), "unschedulable": unschedulable}
    content = {"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": states}}
    return msgspec.convert(content, Node)


def taint(key: str, effect: str, added: str | None = None) -> Object:
    """Return a taint as the API has it."""
    return {"key": key, "effect": effect, **({"timeAdded": added} if added else {})}


OWN = taint("team", "NoSchedule")
LOST = [taint(UNREACHABLE, "NoSchedule"), taint(UNREACHABLE, "NoExecute", "2023-11-14T00:00:00Z")]


@pytest.mark.parametrize(
    ("claim", "subject", "taints"),
    [
        ("a ready node keeps those of others", node("True", OWN), None),
        (
            "a silent one is unreachable",
            node("Unknown", OWN),
            ["team:NoSchedule", f"{UNREACHABLE}:NoSchedule", f"{UNREACHABLE}:NoExecute"],
        ),
        ("once", node("Unknown", *LOST), None),
        ("one that is back is free", node("True", OWN, *LOST), ["team:NoSchedule"]),
        (
            "one that says it is not ready",
            node("False", *LOST),
            [f"{NOT_READY}:NoSchedule", f"{NOT_READY}:NoExecute"],
        ),
        ("one that has said nothing yet", node(""), [f"{NOT_READY}:NoSchedule"]),
        (
            "a cordoned one",
            node("True", unschedulable=True),
            ["node.kubernetes.io/unschedulable:NoSchedule"],
        ),
    ],
)
def test_taints_follow_the_state(claim: str, subject: Node, taints: list[str] | None) -> None:
    """Change no taint of another program."""
    wanted = wanted_taints(subject, NOW)
    shown = None if wanted is None else [f"{one.key}:{one.effect}" for one in wanted]
    assert shown == taints, claim


def test_silent_node_is_told_so_once() -> None:
    """Distinguish conditions that were never set from those that are no longer updated."""
    told = {one["type"]: (one["status"], one["reason"]) for one in silence(node("True"), NOW)}
    assert told["Ready"] == ("Unknown", "NodeStatusUnknown")
    assert told["MemoryPressure"] == ("Unknown", "NodeStatusNeverUpdated")
    assert "Ready" not in {one["type"] for one in silence(node("Unknown"), NOW)}


def test_only_the_node_itself_gives_a_sign_of_life() -> None:
    """Ignore changes of the status that the node itself has not made."""
    assert len({heartbeat(node(ready)) for ready in ("True", "False", "")}) == 3
    assert heartbeat(node("Unknown")) == ""
    beats = [{"type": "Ready", "status": "True", "lastHeartbeatTime": at} for at in (SINCE, LATER)]
    signs = {
        heartbeat(
            msgspec.convert({"metadata": {"name": "n"}, "status": {"conditions": [beat]}}, Node)
        )
        for beat in beats
    }
    assert len(signs) == 2


def pod(tolerations: list[Object] | None = None, **parts: Any) -> Pod:
    """Return a pod of one container."""
    spec = {"containers": [{"name": "c"}], "tolerations": tolerations, **parts}
    return msgspec.convert({"metadata": {"name": "p"}, "spec": spec}, Pod)


def tolerating(key: str, seconds: int | None) -> Object:
    """Return a toleration of NoExecute."""
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}


@pytest.mark.parametrize(
    ("claim", "tolerations", "key", "until"),
    [
        ("no toleration: at once", [], "x", NOW),
        ("forever", [tolerating("x", None)], "x", None),
        ("for a time, from when the taint came", [tolerating("x", 60)], "x", NOW + 40),
        (
            "the shortest of several counts",
            [tolerating("x", 60), tolerating("x", 30)],
            "x",
            NOW + 10,
        ),
        ("a lost node is tolerated for 5 minutes by default", [], UNREACHABLE, NOW + 280),
        ("unless the pod says otherwise", [tolerating(UNREACHABLE, 0)], UNREACHABLE, NOW - 20),
    ],
)
def test_stay_on_a_tainted_node(
    claim: str, tolerations: list[Object], key: str, until: float | None
) -> None:
    """Compare the end of the stay; None: the pod may stay."""
    taints = [msgspec.convert(taint(key, "NoExecute", SINCE), Taint)]
    assert stay(pod(tolerations), taints, NOW).until == until, claim


def volume(name: str, size: str, **parts: Any) -> PersistentVolume:
    """Return a free volume."""
    metadata = {"name": name, "labels": parts.pop("labels", {})}
    spec = {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], **parts}
    return msgspec.convert({"metadata": metadata, "spec": spec}, PersistentVolume)


def claim_of(size: str, **parts: Any) -> PersistentVolumeClaim:
    """Return a claim that is not bound."""
    metadata = {"name": "c", "namespace": "ns", "uid": "12345678-rest"}
    spec = {
        "resources": {"requests": {"storage": size}},
        "accessModes": ["ReadWriteOnce"],
        **parts,
    }
    return msgspec.convert({"metadata": metadata, "spec": spec}, PersistentVolumeClaim)


def reserved(name: str, uid: str = "") -> Object:
    """Return a volume's reference to a claim."""
    return {"claimRef": {"namespace": "ns", "name": name, **({"uid": uid} if uid else {})}}


NO_CLASS = Wait(
    "FailedBinding", "no persistent volumes available for this claim and no storage class is set"
)


@pytest.mark.parametrize(
    ("claim", "subject", "volumes", "chosen"),
    [
        ("one is made", claim_of("1Gi"), [], Provision()),
        ("not without a class", claim_of("1Gi", storageClassName=""), [], NO_CLASS),
        ("the smallest that fits", claim_of("1Gi"), [volume("l", "3Gi"), volume("m", "2Gi")], "m"),
        ("not a smaller one", claim_of("1Gi"), [volume("s", "1023Mi")], Provision()),
        (
            "not one that others have",
            claim_of("1Gi", storageClassName=""),
            [volume("v", "1Gi", **reserved("d", "u"))],
            NO_CLASS,
        ),
        (
            "one that is kept for it, though it is small",
            claim_of("1Gi"),
            [volume("l", "3Gi"), volume("kept", "1Mi", **reserved("c"))],
            "kept",
        ),
        (
            "not one that was its predecessor's",
            claim_of("1Gi"),
            [volume("v", "3Gi", **reserved("c", "old"))],
            Provision(),
        ),
        (
            "not one of another class",
            claim_of("1Gi", storageClassName="fast"),
            [volume("v", "3Gi")],
            Provision(),
        ),
        (
            "not one that cannot be shared",
            claim_of("1Gi", accessModes=["ReadWriteMany"]),
            [volume("v", "3Gi")],
            Provision(),
        ),
        (
            "one with the labels",
            claim_of("1Gi", selector={"matchLabels": {"disk": "x"}}),
            [volume("v", "1Gi"), volume("x", "3Gi", labels={"disk": "x"})],
            "x",
        ),
        ("a named one", claim_of("1Gi", volumeName="l"), [volume("l", "3Gi")], "l"),
        ("a named one that is not there yet", claim_of("1Gi", volumeName="l"), [], Wait()),
        (
            "a named one that is taken",
            claim_of("1Gi", volumeName="v"),
            [volume("v", "1Gi", **reserved("d", "u"))],
            Wait("FailedBinding", 'volume "v" already bound to a different claim.'),
        ),
    ],
)
def test_binding(
    claim: str, subject: PersistentVolumeClaim, volumes: list[PersistentVolume], chosen: object
) -> None:
    """Compare the name of the chosen volume, or the other decision."""
    found = bind(subject, volumes)
    if isinstance(found, Bind):
        assert found.volume.metadata is not None
        assert found.volume.metadata.name == chosen, claim
    else:
        assert found == chosen, claim


def test_directories_are_told_apart() -> None:
    """Name directories by namespace, claim and the claim's uid."""
    assert directory_name(claim_of("1Gi")) == "ns_c_12345678"


def service(**spec: Any) -> Service:
    """Return a service of app=web on port 80."""
    content = {
        "metadata": {"name": "s", "namespace": "ns", "uid": "u"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}], **spec},
    }
    return msgspec.convert(content, Service)


def web(name: str, address: str, ready: str = "True", **more: Any) -> Pod:
    """Return a pod behind the service."""
    metadata = {"name": name, "namespace": "ns", "labels": {"app": "web"}, "uid": f"u-{name}"}
    port = more.pop("port", {"name": "http", "containerPort": 8080})
    metadata.update(more.pop("metadata", {}))
    status = {"podIP": address, "conditions": [{"type": "Ready", "status": ready}], **more}
    spec = {"nodeName": "n", "containers": [{"name": "c", "ports": [port]}]}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Pod)


GOING: Object = {"metadata": {"deletionTimestamp": "2024-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("claim", "subject", "pods", "subsets"),
    [
        ("no pod", service(), [], []),
        (
            "ready and not",
            service(),
            [web("b", "127.0.0.3", "False"), web("a", "127.0.0.2")],
            ["127.0.0.2 | 127.0.0.3 : 8080/TCP"],
        ),
        (
            "not those that are done, going, without address, or of others",
            service(),
            [
                web("a", "127.0.0.2", phase="Failed"),
                web("b", "127.0.0.3", **GOING),
                web("c", ""),
                web("d", "127.0.0.4", metadata={"labels": {"app": "db"}}),
            ],
            [],
        ),
        (
            "all, if the service wants them early",
            service(publishNotReadyAddresses=True),
            [web("a", "127.0.0.2", "False"), web("b", "127.0.0.3", **GOING)],
            ["127.0.0.2 127.0.0.3 |  : 8080/TCP"],
        ),
        (
            "named ports may differ",
            service(),
            [
                web("a", "127.0.0.2"),
                web("b", "127.0.0.3", port={"name": "http", "containerPort": 9}),
            ],
            ["127.0.0.3 |  : 9/TCP", "127.0.0.2 |  : 8080/TCP"],
        ),
        ("no port at all", service(ports=None), [web("a", "127.0.0.2")], ["127.0.0.2 |  : "]),
        ("no selector, no pods", service(selector=None), [web("a", "127.0.0.2")], []),
    ],
)
def test_addresses(claim: str, subject: Service, pods: list[Pod], subsets: list[str]) -> None:
    """Compare the addresses of Endpoints; slices have the same addresses."""
    found = endpoints(subject, backends(subject, pods))
    shown = []
    for one in found.get("subsets", []):
        ready = " ".join(address["ip"] for address in one.get("addresses", []))
        other = " ".join(address["ip"] for address in one.get("notReadyAddresses", []))
        ports = " ".join(f"{port['port']}/{port['protocol']}" for port in one.get("ports", []))
        shown.append(f"{ready} | {other} : {ports}")
    assert shown == subsets, claim
    assert slices(subject, backends(subject, pods))


def test_slices_hold_a_hundred() -> None:
    """Mark the pods that are being deleted."""
    pods = [web(f"p{i:03}", f"127.0.1.{i}") for i in range(150)]
    pods.append(web("q", "127.0.2.1", **GOING))
    found = slices(service(), backends(service(), pods))
    assert [one["metadata"]["name"] for one in found] == ["s-0", "s-1"]
    assert [len(one["endpoints"]) for one in found] == [100, 51]
    last = found[1]["endpoints"][-1]["conditions"]
    assert last == {"ready": False, "serving": False, "terminating": True}


def test_pod_of_the_services_domain_has_its_hostname() -> None:
    """Require the subdomain of that very service."""

    def shown(subdomain: str) -> list[str | None]:
        one = web("a", "127.0.0.2")
        assert one.spec is not None
        one.spec.hostname, one.spec.subdomain = "worker-0", subdomain
        found = endpoints(service(), backends(service(), [one]))
        return [address.get("hostname") for address in found["subsets"][0]["addresses"]]

    assert shown("s") == ["worker-0"]
    assert shown("other") == [None]


def test_headless_services_are_labelled() -> None:
    """Label them, so that name servers and clients can recognize them."""
    found = endpoints(service(clusterIP="None"), [])
    assert found["metadata"]["labels"] == {"service.kubernetes.io/headless": ""}
    assert endpoints(service(clusterIP="10.0.0.1"), [])["metadata"]["labels"] == {}


def test_namespace_says_what_keeps_it() -> None:
    """Count the remaining objects by kind and by finalizer."""
    kind = ResourceKind("example.com", "v1", "Lock", "locks", namespaced=True)
    left = [Item(kind, Key("ns", name), name, "1", (), ("example.com/hold",)) for name in "ab"]
    told = {one["type"]: (one["status"], one["message"]) for one in conditions(left, [])}
    assert told["NamespaceContentRemaining"] == (
        "True",
        "Some resources are remaining: locks.example.com has 2 resource instances",
    )
    assert told["NamespaceFinalizersRemaining"] == (
        "True",
        (
            "Some content in the namespace has finalizers remaining: "
            "example.com/hold in 2 resource instances"
        ),
    )
    assert told["NamespaceDeletionContentFailure"][0] == "False"

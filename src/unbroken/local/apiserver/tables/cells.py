"""Cells of tables that take more than looking up a field.

Texts are those of pkg/printers/internalversion/printers.go of Kubernetes v1.33.

Ages and durations are as `kubectl get` shows them. `pod_summary` is the status of a pod in one
word, as `kubectl get pods` shows it (printPod, v1.33).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.validation.fields import at

UNKNOWN = "<unknown>"

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def human_duration(seconds: float) -> str:
    """Two units at most, the finer one only while it matters (`duration.HumanDuration`, v1.33)."""
    whole = int(seconds)
    if whole < -1:
        return "<invalid>"
    whole = max(whole, 0)
    steps = (
        # (below, unit, its letter, finer unit, its letter)
        (2 * _MINUTE, 1, "s", 0, ""),
        (10 * _MINUTE, _MINUTE, "m", 1, "s"),
        (3 * _HOUR, _MINUTE, "m", 0, ""),
        (8 * _HOUR, _HOUR, "h", _MINUTE, "m"),
        (2 * _DAY, _HOUR, "h", 0, ""),
        (8 * _DAY, _DAY, "d", _HOUR, "h"),
        (2 * _YEAR, _DAY, "d", 0, ""),
        (8 * _YEAR, _YEAR, "y", _DAY, "d"),
    )
    for below, unit, letter, finer, finer_letter in steps:
        if whole < below:
            rest = whole % unit // finer if finer else 0
            return f"{whole // unit}{letter}" + (f"{rest}{finer_letter}" if rest else "")
    return f"{whole // _YEAR}y"


def seconds_of(timestamp: str | None) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None when there is none that can be read."""
    if not timestamp:
        return None
    try:
        read = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return read.timestamp() if read.tzinfo is not None else None


def age(now: float, timestamp: str | None) -> str:
    """Time since a timestamp."""
    since = seconds_of(timestamp)
    return UNKNOWN if since is None else human_duration(now - since)


NODE_LOST = "NodeLost"


@dataclass(slots=True)
class Summary:
    """Contents of the columns READY, STATUS and RESTARTS."""

    status: str
    ready: int = 0
    total: int = 0
    restarts: int = 0
    restarted_at: str | None = None
    """Time of the last end of a container that was started again."""

    def count(self, container: Object) -> None:
        """Add the restarts of a container."""
        self.restarts += container.get("restartCount") or 0
        ended = ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        if (seconds_of(ended) or 0.0) > (seconds_of(self.restarted_at) or 0.0):
            self.restarted_at = ended

    def restarts_text(self, now: float) -> str:
        """`3 (5m ago)`."""
        if self.restarts and self.restarted_at:
            return f"{self.restarts} ({age(now, self.restarted_at)} ago)"
        return str(self.restarts)


def has_condition(content: Object, name: str) -> bool:
    """True if a condition of the object's status is True."""
    conditions = (content.get("status") or {}).get("conditions") or []
    return any(c.get("type") == name and c.get("status") == "True" for c in conditions)


def pod_summary(pod: Object) -> Summary:
    """Sum up a pod."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    result = Summary(status.get("reason") or status.get("phase") or "")
    result.total = len(spec.get("containers") or []) + len(_sidecars(spec))
    for condition in status.get("conditions") or []:
        if (condition.get("type"), condition.get("reason")) == ("PodScheduled", "SchedulingGated"):
            result.status = "SchedulingGated"
    sidecars = Summary("")
    is_initializing = _initialize(pod, result, sidecars)
    if not is_initializing or has_condition(pod, "Initialized"):
        result.restarts, result.restarted_at = sidecars.restarts, sidecars.restarted_at
        _run(pod, result)
    if "deletionTimestamp" in pod["metadata"]:
        if status.get("reason") == NODE_LOST:
            result.status = "Unknown"
        elif status.get("phase") not in ("Succeeded", "Failed"):
            result.status = "Terminating"
    return result


def _sidecars(spec: Object) -> set[str]:
    """Return the init containers that keep running with the others."""
    containers = spec.get("initContainers") or []
    return {c.get("name", "") for c in containers if c.get("restartPolicy") == "Always"}


def _initialize(pod: Object, found: Summary, sidecars: Summary) -> bool:
    """Take in the init containers, up to the first that is not done; whether there is one."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    lasting = _sidecars(spec)
    for index, container in enumerate(status.get("initContainerStatuses") or []):
        found.count(container)
        is_sidecar = container.get("name") in lasting
        if is_sidecar:
            sidecars.count(container)
        state = container.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting") or {}
        if terminated is not None and not terminated.get("exitCode"):
            continue
        if is_sidecar and container.get("started"):
            found.ready += bool(container.get("ready"))
            continue
        if terminated is not None:
            found.status = f"Init:{_ending(terminated)}"
        elif waiting.get("reason") and waiting["reason"] != "PodInitializing":
            found.status = f"Init:{waiting['reason']}"
        else:
            found.status = f"Init:{index}/{len(spec.get('initContainers') or [])}"
        return True
    return False


def _run(pod: Object, found: Summary) -> None:
    """Count the containers; the first one with a reason gives the status."""
    has_running = False
    for container in reversed((pod.get("status") or {}).get("containerStatuses") or []):
        found.count(container)
        state = container.get("state") or {}
        if (state.get("waiting") or {}).get("reason"):
            found.status = state["waiting"]["reason"]
        elif state.get("terminated") is not None:
            found.status = _ending(state["terminated"])
        elif container.get("ready") and state.get("running") is not None:
            has_running = True
            found.ready += 1
    if found.status == "Completed" and has_running:
        found.status = "Running" if has_condition(pod, "Ready") else "NotReady"


def _ending(terminated: Object) -> str:
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode') or 0}"


def readiness_gates(pod: Object) -> str:
    """Return the number of the pod's own readiness conditions that are met: `1/2`."""
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if not gates:
        return "<none>"
    met = sum(has_condition(pod, gate.get("conditionType", "")) for gate in gates)
    return f"{met}/{len(gates)}"


def row_conditions(pod: Object) -> list[Object]:
    """Return the row conditions of a pod that has ended, by which clients can hide it."""
    phase = (pod.get("status") or {}).get("phase")
    messages = {
        "Succeeded": "The pod has completed successfully.",
        "Failed": "The pod failed.",
    }
    if phase not in messages:
        return []
    message = messages[phase]
    return [{"type": "Completed", "status": "True", "reason": phase, "message": message}]


NONE = "<none>"
UNSET = "<unset>"
_SHOWN = 3
"""Endpoints that are listed before `+ N more...`."""


def labels_text(labels: Mapping[str, str] | None) -> str:
    """`a=b,c=d`."""
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items())) or NONE


def selector_text(selector: Object | None) -> str:
    """A selector in the form that is written in a request; empty when it takes everything."""
    if selector is None:
        return ""
    terms = [(key, f"{key}={value}") for key, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or []:
        key, values = term.get("key", ""), ",".join(sorted(term.get("values") or []))
        match term.get("operator"):
            case "Exists":
                terms.append((key, key))
            case "DoesNotExist":
                terms.append((key, f"!{key}"))
            case operator:
                terms.append((key, f"{key} {str(operator).lower()} ({values})"))
    return ",".join(text for _, text in sorted(terms, key=lambda term: term[0]))


def _more(shown: Sequence[str], total: int, empty: str) -> str:
    listed = ",".join(shown[:_SHOWN])
    return f"{listed} + {total - _SHOWN} more..." if total > _SHOWN else listed or empty


def pod_ip(pod: Object) -> str:
    """First address of a pod."""
    addresses = at(pod, "status.podIPs") or [{"ip": at(pod, "status.podIP")}]
    return addresses[0].get("ip") or NONE


def pod_ready(pod: Object) -> str:
    """Containers that are ready, of all."""
    summary = pod_summary(pod)
    return f"{summary.ready}/{summary.total}"


def node_status(node: Object) -> str:
    """Readiness, and whether pods may come."""
    conditions = at(node, "status.conditions") or []
    ready = [c.get("status") for c in conditions if c.get("type") == "Ready"]
    words = ["Ready" if status == "True" else "NotReady" for status in ready] or ["Unknown"]
    if at(node, "spec.unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def node_roles(node: Object) -> str:
    """Roles, from labels."""
    roles: set[str] = set()
    for key, value in (node["metadata"].get("labels") or {}).items():
        if key.startswith("node-role.kubernetes.io/"):
            roles.add(key.partition("/")[2])
        elif key == "kubernetes.io/role":
            roles.add(value)
    return ",".join(sorted(roles - {""})) or NONE


def node_address(type_: str) -> Callable[[Object], str]:
    """First address of a type."""

    def first(node: Object) -> str:
        addresses = at(node, "status.addresses") or []
        return next((a.get("address", "") for a in addresses if a.get("type") == type_), NONE)

    return first


def first_seen(event: Object, now: float) -> str:
    """Since when an event has been seen."""
    return age(now, event.get("firstTimestamp") or event.get("eventTime"))


def last_seen(event: Object, now: float) -> str:
    """Return when an event was last seen."""
    if event.get("series"):
        return age(now, event["series"].get("lastObservedTime"))
    last = event.get("lastTimestamp")
    return age(now, last) if last else first_seen(event, now)


def event_object(event: Object) -> str:
    """Return the object of an event: `pod/a`."""
    kind, name = at(event, "involvedObject.kind") or "", at(event, "involvedObject.name")
    return f"{kind.lower()}/{name}" if name else kind.lower()


def event_source(event: Object) -> str:
    """Reporter of an event, and where it is."""
    component = at(event, "source.component") or event.get("reportingComponent") or ""
    place = at(event, "source.host") or event.get("reportingInstance") or ""
    return f"{component}, {place}" if place else component


def event_count(event: Object) -> int:
    """A series counts what came after its first event."""
    series = event.get("series")
    return 1 + (series.get("count") or 0) if series else event.get("count") or 1


def service_ports(service: Object) -> str:
    """`80:30080/TCP`."""
    shown = []
    for port in at(service, "spec.ports") or []:
        node_port = f":{port['nodePort']}" if port.get("nodePort") else ""
        shown.append(f"{port.get('port')}{node_port}/{port.get('protocol')}")
    return ",".join(shown) or NONE


def external_ip(service: Object) -> str:
    """Addresses of a service from outside."""
    spec = service.get("spec") or {}
    given: list[str] = spec.get("externalIPs") or []
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName") or "")
    if spec.get("type") == "LoadBalancer":
        ingress = at(service, "status.loadBalancer.ingress") or []
        result = sorted({i.get("ip") or i.get("hostname") or "" for i in ingress} - {""})
        return ",".join([*result, *given]) or "<pending>"
    return ",".join(given) or NONE


def cluster_ip(service: Object) -> str:
    """Address of a service from inside."""
    spec = service.get("spec") or {}
    return (spec.get("clusterIPs") or [spec.get("clusterIP")])[0] or NONE


def host_port(address: str, port: int) -> str:
    """Join an address and a port; brackets mark IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def endpoints(endpoints: Object) -> str:
    """Addresses and ports, the first three."""
    shown: list[str] = []
    for subset in endpoints.get("subsets") or []:
        addresses = [a.get("ip", "") for a in subset.get("addresses") or []]
        ports = [port.get("port", 0) for port in subset.get("ports") or []]
        if ports:
            shown += [host_port(address, port) for port in ports for address in addresses]
        else:
            shown += addresses
    return _more(shown, len(shown), "" if endpoints.get("subsets") else NONE)


def slice_ports(content: Object) -> str:
    """Ports of an endpoint slice."""
    given = content.get("ports") or []
    ports = [str(port.get("port") or port.get("name") or "*") for port in given]
    return _more(ports, len(ports), UNSET)


def slice_addresses(content: Object) -> str:
    """Addresses of an endpoint slice."""
    endpoints = content.get("endpoints") or []
    shown = [address for endpoint in endpoints for address in endpoint.get("addresses") or []]
    return _more(shown, len(shown), UNSET)


def modes(modes: Sequence[str] | None) -> str:
    """Access modes in short, in the order of Kubernetes."""
    names = {
        "ReadWriteOnce": "RWO",
        "ReadOnlyMany": "ROX",
        "ReadWriteMany": "RWX",
        "ReadWriteOncePod": "RWOP",
    }
    return ",".join(short for mode, short in names.items() if mode in (modes or ()))


def phase(content: Object) -> str:
    """Phase of a volume or a claim."""
    is_going = "deletionTimestamp" in content["metadata"]
    return "Terminating" if is_going else at(content, "status.phase") or ""


def bound(path: str) -> Callable[[Object], Any]:
    """A claim shows capacity and modes only once it has a volume."""
    return lambda claim: at(claim, path) if at(claim, "spec.volumeName") else None


def storage_class(content: Object) -> str:
    """Class of a volume or a claim."""
    annotations = content["metadata"].get("annotations") or {}
    old = annotations.get("volume.beta.kubernetes.io/storage-class")
    return old or at(content, "spec.storageClassName") or ""


def claim(volume: Object) -> str:
    """Claim that has a volume."""
    claim = at(volume, "spec.claimRef")
    return f"{claim.get('namespace', '')}/{claim.get('name', '')}" if claim else ""


def storage_class_name(content: Object) -> str:
    """Name, and whether it is the default."""
    annotations = content["metadata"].get("annotations") or {}
    marks = (
        "storageclass.kubernetes.io/is-default-class",
        "storageclass.beta.kubernetes.io/is-default-class",
    )
    is_default = any(annotations.get(mark) == "true" for mark in marks)
    return f"{content['metadata'].get('name', '')}{' (default)' if is_default else ''}"


def amount(path: str) -> Callable[[Object], str]:
    """A number or a percentage."""

    def shown(content: Object) -> str:
        value = at(content, path)
        return "N/A" if value is None else str(value)

    return shown


def job_status(job: Object) -> str:
    """Return the outcome of a job."""
    for name in ("Complete", "Failed"):
        if has_condition(job, name):
            return name
    if "deletionTimestamp" in job["metadata"]:
        return "Terminating"
    for name in ("Suspended", "FailureTarget", "SuccessCriteriaMet"):
        if has_condition(job, name):
            return name
    return "Running"


def completions(job: Object) -> str:
    """Pods that succeeded, of those wanted."""
    done = at(job, "status.succeeded") or 0
    wanted, parallelism = at(job, "spec.completions"), at(job, "spec.parallelism") or 0
    if wanted is not None:
        return f"{done}/{wanted}"
    return f"{done}/1 of {parallelism}" if parallelism > 1 else f"{done}/1"


def containers(job: Object, field: str) -> str:
    """Return one field of each container of a job's template."""
    return ",".join(each.get(field, "") for each in at(job, "spec.template.spec.containers") or [])


def job_duration(job: Object, now: float) -> str:
    """Return the duration of a job, until now if it has not ended."""
    start = seconds_of(at(job, "status.startTime"))
    if start is None:
        return ""
    conditions = at(job, "status.conditions") or []
    failed = [
        c.get("lastTransitionTime")
        for c in conditions
        if c.get("type") == "Failed" and c.get("status") == "True"
    ]
    end = seconds_of(at(job, "status.completionTime") or next(iter(failed), None))
    return human_duration((now if end is None else end) - start)


def subjects(kind: str) -> Callable[[Object], str]:
    """Names of the subjects of a kind."""

    def named(content: Object) -> str:
        result = [s for s in content.get("subjects") or [] if s.get("kind") == kind]
        if kind == "ServiceAccount":
            return ", ".join(f"{s.get('namespace', '')}/{s.get('name', '')}" for s in result)
        return ", ".join(s.get("name", "") for s in result)

    return named

"""The scheduler's picture of the cluster, updated by small changes. Pure.

A pod counts on its node from the moment it is assumed there, before the API shows it. Labels are
indexed, so that a selector finds its pods without a look at every pod.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lightkube.models.core_v1 import PodAffinityTerm
from lightkube.models.meta_v1 import LabelSelector

from unbroken.kube.cache import Key

from .model import NodeInfo, PodInfo
from .selectors import matches_labels

Entry = TypeVar("Entry")


@dataclass(slots=True)
class Place:
    """A node, the pods on it, and what they take."""

    node: NodeInfo | None = None
    """The node; None: pods name a node that is not known."""
    pods: dict[Key, PodInfo] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim, as far as pods wait for it."""

    is_bound: bool
    is_deleting: bool = False


class Cluster:
    """Nodes, the pods on them, and what else a decision looks at."""

    def __init__(self, nodes: Iterable[NodeInfo] = (), pods: Iterable[PodInfo] = ()) -> None:
        self.places: dict[str, Place] = {}
        self.claims: dict[Key, Claim] = {}
        self.namespaces: dict[str, Mapping[str, str]] = {}
        """Labels by name."""
        self.repelling: dict[Key, PodInfo] = {}
        """Placed pods with required anti-affinity, which concerns every later pod."""
        self.nominated: dict[Key, PodInfo] = {}
        """Waiting pods for which room is being made."""
        self._placed: dict[Key, PodInfo] = {}
        self._by_label: defaultdict[tuple[str, str, str], dict[Key, PodInfo]] = defaultdict(dict)
        self._by_namespace: defaultdict[str, dict[Key, PodInfo]] = defaultdict(dict)
        for node in nodes:
            self.set_node(node)
        for pod in pods:
            self.put_pod(pod)

    def nodes(self) -> Iterator[tuple[NodeInfo, Place]]:
        """Known nodes."""
        for place in self.places.values():
            if place.node is not None:
                yield place.node, place

    def set_node(self, node: NodeInfo) -> None:
        """Add a node or take its new state."""
        self.places.setdefault(node.name, Place()).node = node

    def remove_node(self, name: str) -> None:
        """Forget a node; pods that name it are remembered."""
        place = self.places.get(name)
        if place is not None:
            place.node = None
            self._tidy(name)

    def pod(self, key: Key) -> PodInfo | None:
        """A placed pod."""
        return self._placed.get(key)

    def put_pod(self, pod: PodInfo) -> None:
        """Count a pod on `pod.node`, where it runs or is assumed to."""
        assert pod.node, pod.key
        self.remove_pod(pod.key)
        self._placed[pod.key] = pod
        place = self.places.setdefault(pod.node, Place())
        place.pods[pod.key] = pod
        for name, amount in pod.requests.items():
            place.used[name] = place.used.get(name, 0) + amount
        self._by_namespace[pod.key.namespace][pod.key] = pod
        for label, value in pod.labels.items():
            self._by_label[pod.key.namespace, label, value][pod.key] = pod
        if pod.anti_affinity:
            self.repelling[pod.key] = pod

    def remove_pod(self, key: Key) -> None:
        """Forget a pod that is gone or done."""
        pod = self._placed.pop(key, None)
        if pod is None:
            return
        place = self.places[pod.node]
        del place.pods[key]
        for name, amount in pod.requests.items():
            place.used[name] -= amount
        self._tidy(pod.node)
        _drop(self._by_namespace, key.namespace, key)
        for label, value in pod.labels.items():
            _drop(self._by_label, (key.namespace, label, value), key)
        self.repelling.pop(key, None)

    def matching(
        self, namespaces: Collection[str], selector: LabelSelector | None
    ) -> Iterator[PodInfo]:
        """Placed pods in the namespaces whose labels the selector matches."""
        if selector is None:
            return
        for namespace in namespaces:
            pods: Mapping[Key, PodInfo] = self._by_namespace.get(namespace, {})
            for label, value in (selector.matchLabels or {}).items():
                fewer = self._by_label.get((namespace, label, value), {})
                if len(fewer) < len(pods):
                    pods = fewer
            for pod in pods.values():
                if matches_labels(selector, pod.labels):
                    yield pod

    def namespaces_of(self, term: PodAffinityTerm, owner: PodInfo) -> Collection[str]:
        """Namespaces that a term of `owner` looks at; its own if the term names none."""
        if not term.namespaces and term.namespaceSelector is None:
            return {owner.key.namespace}
        result = set(term.namespaces or ())
        if term.namespaceSelector is not None:
            selector = term.namespaceSelector
            result.update(
                name for name, labels in self.namespaces.items() if matches_labels(selector, labels)
            )
        return result

    def _tidy(self, name: str) -> None:
        place = self.places[name]
        if place.node is None and not place.pods:
            del self.places[name]


def _drop(index: dict[Entry, dict[Key, PodInfo]], entry: Entry, key: Key) -> None:
    held = index[entry]
    del held[key]
    if not held:
        del index[entry]

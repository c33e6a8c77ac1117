"""The parts of a Kubernetes cluster that a person's account may read, for the live page.

Each request goes to the Kubernetes API with the account of the person's kubeconfig, so Kubernetes
decides who sees what. What it refuses is left out, and the page says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from unbroken.cli.connection import INCIDENTS, JOBS, Cluster, Object, ObjectKind
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import monotonic
from unbroken.kube.errors import ApiRefusal, Forbidden

from .actions import person_here

NAMESPACES = ObjectKind("api/v1", "namespaces", "namespace", is_namespaced=False)
NEEDED = (JOBS, INCIDENTS)
"""Kinds without which a job's state and cost would be shown wrong: a namespace without the right to
list both is not shown."""
NAMESPACES_MAX = 100
"""Namespaces that are read one by one."""
NAMED_MAX = 10
"""Namespaces that a sentence names."""
SCOPE_SECONDS = 60.0
"""Seconds after which the namespaces and rights are looked up again."""
RIGHTS_MAX = 1000
"""Rights that are remembered."""
AUTHORIZATION = "apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
AUTHENTICATION = "apis/authentication.k8s.io/v1/selfsubjectreviews"
OPTION = "unbroken ui --namespace NAME"
KINDS = " and ".join(kind.plural for kind in NEEDED)


@dataclass(frozen=True, slots=True)
class NamespaceScope:
    """Namespaces whose jobs the page shows."""

    names: tuple[str, ...] = ("",)
    """An empty name stands for all namespaces in one request."""
    notes: tuple[str, ...] = ()
    """Sentences about the other namespaces."""


class _ReviewStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    """The answer to a SelfSubjectAccessReview."""

    status: _ReviewStatus


class _UserInfo(msgspec.Struct):
    username: str


class _SelfStatus(msgspec.Struct):
    userInfo: _UserInfo


class _SelfReview(msgspec.Struct):
    """The answer to a SelfSubjectReview, of Kubernetes 1.28 and later."""

    status: _SelfStatus


Right = tuple[str, str, str]
"""Verb, resource with its group, namespace (empty: cluster-wide)."""


@dataclass(slots=True)
class Rights:
    """The rights of the account, as Kubernetes said last."""

    known: dict[Right, tuple[bool, float]] = field(default_factory=dict)
    """Each with the time of the monotonic clock until which it counts."""

    async def may(self, client: KubeClient, right: Right) -> bool:
        """True if the account has a right; False also if it may not even ask."""
        now = monotonic()
        found, until = self.known.pop(right, (False, now))
        if until <= now:
            found, until = await _may(client, right), now + SCOPE_SECONDS
        self.known[right] = found, until
        if len(self.known) > RIGHTS_MAX:
            del self.known[next(iter(self.known))]
        return found


async def _may(client: KubeClient, right: Right) -> bool:
    verb, resource, namespace = right
    name, _, group = resource.partition(".")
    plural, _, subresource = name.partition("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace}
    attributes |= {"subresource": subresource} if subresource else {}
    body = {
        **{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"},
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await client.raw("POST", AUTHORIZATION, body=body)
    except ApiRefusal:
        return False
    return msgspec.json.decode(answer, type=_AccessReview).status.allowed


class Account:
    """The account of a kubeconfig."""

    def __init__(
        self,
        place: ClusterPlace,
        client: KubeClient,
        chosen: Sequence[str],
        way: str = OPTION,
    ) -> None:
        """`chosen`: namespaces to show; empty: all that the account may read.  `way`: how a person
        names other ones."""
        self._way = way
        self._place = place
        self._client = client
        self._chosen = tuple(dict.fromkeys(chosen))
        self._scope = NamespaceScope()
        self._until = float("-inf")
        self._lock = asyncio.Lock()
        self._rights = Rights()

    async def person(self) -> str:
        """The name of the account, for the events about its actions.

        Kubernetes before 1.28 does not tell it: then it is the user who runs this program.
        """
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            answer = await self._client.raw("POST", AUTHENTICATION, body=body)
            return msgspec.json.decode(answer, type=_SelfReview).status.userInfo.username
        except (ApiRefusal, msgspec.MsgspecError):
            return person_here()

    async def cluster(self, namespace: str) -> Cluster:
        """The cluster as the account may read it; SpecError if no namespace can be shown."""
        async with self._lock:
            if monotonic() >= self._until:
                self._scope = await self._find_scope()
                self._until = monotonic() + SCOPE_SECONDS
        return PermittedCluster(self._place, self._client, namespace, self._scope, self._rights)

    async def _find_scope(self) -> NamespaceScope:
        names, notes = self._chosen, tuple[str, ...]()
        if not names:
            if await self._may_read(""):
                return NamespaceScope()
            names, notes = await self._candidates()
        answers = await asyncio.gather(*map(self._may_read, names))
        shown = tuple(one for one, may in zip(names, answers, strict=True) if may)
        hidden = tuple(one for one, may in zip(names, answers, strict=True) if not may)
        if not shown:
            raise SpecError(
                f"this account may not list {KINDS} in {namespaces_text(hidden)}: name a "
                f"namespace where it may ({self._way}), or ask for the right"
            )
        if hidden:
            text = namespaces_text(hidden)
            notes = (f"Not shown: {text}. Your account may not list {KINDS} there.", *notes)
        return NamespaceScope(shown, notes)

    async def _candidates(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Namespaces to try, and sentences about those that are not tried."""
        own = self._client.namespace or "default"
        try:
            found = await Cluster(self._place, self._client, "").select(NAMESPACES)
        except Forbidden:
            text = "Your account may not list all namespaces. Others than"
            return (own,), (f"{text} {own} are shown if you name them: {self._way}.",)
        names = dict.fromkeys([own, *sorted(str(one["metadata"]["name"]) for one in found)])
        if len(names) <= NAMESPACES_MAX:
            return tuple(names), ()
        note = (
            f"Only {NAMESPACES_MAX} of {len(names)} namespaces are tried. Name others: {self._way}."
        )
        return tuple(names)[:NAMESPACES_MAX], (note,)

    async def _may_read(self, namespace: str) -> bool:
        """True if the account may list what the page needs of a namespace (empty: of all)."""
        cluster = Cluster(self._place, self._client, namespace)
        for kind in NEEDED:
            if not await cluster.may_list(kind):
                return False
        return True


def namespaces_text(names: Sequence[str]) -> str:
    """Namespaces in words, the first by name."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    noun = "namespace" if len(names) == 1 else "namespaces"
    return f"{noun} {', '.join(names[:NAMED_MAX])}{more}"


class PermittedCluster(Cluster):
    """Objects that the account may read; what Kubernetes refuses is noted and left out."""

    def __init__(
        self,
        place: ClusterPlace,
        client: KubeClient,
        namespace: str,
        scope: NamespaceScope,
        rights: Rights,
    ) -> None:
        super().__init__(place, client, namespace)
        self._scope = scope
        self._rights = rights
        self._refused: dict[str, set[str]] = {}
        """Plurals of refused kinds, by namespace; empty: cluster-wide."""
        self._reads_all = False
        """True once all namespaces that are shown were read."""

    async def may(self, verb: str, collection: ObjectKind, subresource: str = "") -> bool:
        """True if Kubernetes lets the account do this to all objects of the namespace."""
        name = f"{collection.plural}/{subresource}" if subresource else collection.plural
        namespace = self.namespace if collection.is_namespaced else ""
        return await self._rights.may(self.client, (verb, f"{name}.{collection.group}", namespace))

    async def find(self, collection: ObjectKind, name: str) -> Object | None:
        """One object, as `Cluster.find`.  Raises Forbidden, with a sentence for the person."""
        try:
            return await super().find(collection, name)
        except Forbidden as error:
            where = f" in namespace {self.namespace}" if collection.is_namespaced else ""
            text = f"your account may not read {collection.noun} {name}{where}"
            raise Forbidden(text, error.code, error.reason) from error

    async def select(
        self, collection: ObjectKind, labels: str = "", namespace: str | None = None
    ) -> list[Object]:
        """All objects that the account may list; `namespace` empty: of all that are shown."""
        if not collection.is_namespaced:
            return await self._permitted(collection, labels, "")
        if namespace == "":
            self._reads_all = True
            found = (self._permitted(collection, labels, one) for one in self._scope.names)
            return [item for items in await asyncio.gather(*found) for item in items]
        return await self._permitted(collection, labels, namespace or self.namespace)

    async def _permitted(self, collection: ObjectKind, labels: str, namespace: str) -> list[Object]:
        try:
            return await super().select(collection, labels, namespace)
        except Forbidden as error:
            if collection in NEEDED:  # the right was taken away since the scope was found
                where = f" in namespace {namespace}" if namespace else ""
                text = f"your account may not list {collection.plural}{where}"
                raise Forbidden(text, error.code, error.reason) from error
            self._refused.setdefault(namespace, set()).add(collection.plural)
            return []

    def missing(self) -> list[str]:
        """Sentences about what Kubernetes has refused to this account."""
        lines = list(self._scope.notes) if self._reads_all else []
        for namespace, plurals in sorted(self._refused.items()):
            where = f" in namespace {namespace}" if namespace else ""
            listed = ", ".join(sorted(plurals))
            lines.append(f"Your account may not list these{where}. They are not shown: {listed}.")
        return lines

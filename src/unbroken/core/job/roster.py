"""The pods of a job, their agents and their nodes, as they are known, and the ranks of the pods.

The roster decides nothing. It drops stale input: a pod seen again after it was gone, and a report
that a newer one has replaced. It also drops a report from an agent process that another one has
followed.

`Ranks` assigns node ranks to pods. At first assignment, pods are ordered by topology labels, then
replica spec, then index. A pod keeps its rank as long as it trains. A free rank goes to a pod of
the same replica spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from unbroken.spec.job.types import ReplicaSpec
from unbroken.spec.nodes.notices import Notice
from unbroken.wire.agent import AgentReport, AgentState

from .clocks import AgentClock
from .events import NodeName, NodeView, PodName, PodPhase, PodUid, PodView

UNHEARD = -2
"""`Member.clear_through` of a pod that may run anything: it ran before it was first seen."""
NEVER_ORDERED = 1 << 62
"""`Member.clear_through` of a pod that never received a start order."""
RANKS_OF_NODE_MAX = 256
"""Most ranks of one node; no machine has processors for more."""
_GONE_KEPT = 50_000
PAST_AGENTS_KEPT = 64
"""Earlier agent processes remembered per pod, so that their late reports are ignored."""
_PHASE_ORDER = {
    PodPhase.PENDING: 0,
    PodPhase.UNKNOWN: 1,
    PodPhase.RUNNING: 1,
    PodPhase.SUCCEEDED: 2,
    PodPhase.FAILED: 2,
}
# Within an attempt an agent's state only moves in this order; READY means that the attempt is over.
_STATE_ORDER = {
    AgentState.INIT: 0,
    AgentState.RUNNING: 1,
    AgentState.COMPLETED: 2,
    AgentState.FAULTED: 2,
    AgentState.STOPPING: 3,
    AgentState.READY: 4,
    AgentState.SHUTDOWN: 5,
}
_BETWEEN_ATTEMPTS = (AgentState.INIT, AgentState.READY, AgentState.SHUTDOWN)
ReportPosition = tuple[int, int, bool, int, bool]
"""Attempt, state, whether a port is offered, minus the number of workers at the barrier, whether it
is the last report."""
_UNKNOWN: ReportPosition = (-2, 0, False, 0, False)


def is_stock(report: AgentReport) -> bool:
    """True if the agent is one that knows neither attempts nor ports (HyperPod agent 1.1.3)."""
    return report.nproc is None and report.newest_attempt is None and report.attempt is None


def is_loopback(address: str) -> bool:
    """True if pods with such addresses are processes of one machine."""
    return address.startswith("127.")


def of_ranks(report: AgentReport, nnodes: int, wanted: int) -> AgentReport:
    """Return the report without its watch if that has ranks beyond any job of this size.

    Otherwise the records kept for each rank would have no bound. `nnodes`, `wanted`: of the job as
    it runs, and as its spec says; 0: not known.
    """
    last = max(one.rank for one in report.watch)
    nodes = max(nnodes, wanted)
    return report if last < RANKS_OF_NODE_MAX * nodes or not nodes else replace(report, watch=())


def _is_early_fault(report: AgentReport) -> bool:
    """True if the agent reports a fault of workers that have no rank yet."""
    if is_stock(report):
        return report.is_unstarted
    return report.state is AgentState.FAULTED and report.attempt is None


def _next_attempt(report: AgentReport) -> int:
    return 0 if report.newest_attempt is None else report.newest_attempt + 1


@dataclass(slots=True, eq=False)
class Member:
    """One pod of the job and its agent."""

    view: PodView
    clear_through: int
    """Newest attempt that is proven to have no worker here, now or later."""
    report: AgentReport | None = None
    """Newest report of the newest agent process."""
    position: ReportPosition = _UNKNOWN
    past_agents: dict[str, None] = field(default_factory=dict)
    """Earlier agent processes of the pod, oldest first."""
    ordered: int | None = None
    """Newest attempt that the present agent process was ordered to start."""
    asked: int = -1
    """Newest attempt that the present agent process was ordered to stop."""
    asked_before: int = -1
    """Newest attempt that a stock agent was ordered to stop before its present workers."""
    lost_why: str = ""
    """Why the agent cannot be reached; empty: it can."""
    asked_when_lost: int = -1
    """`asked` when the agent was lost: orders since then may have reached no process of it."""
    condemned: str = ""
    """Why the pod must go; empty: it may stay."""
    condemned_at: float = 0.0
    is_fenced: bool = False
    """Its node was proven to run nothing while the pod was placed there."""
    has_no_node: bool = False
    """Its node was reported as out of the cluster, and was not seen since."""
    has_ended: bool = False
    """Its containers were seen to end while it was being deleted."""
    is_lease_over: bool = False
    """Its agent is silent, and no worker can live there: the lease on them has run out, or there
    were none (`core.job.leases`)."""
    clock: AgentClock = field(default_factory=AgentClock)
    uid: PodUid = field(init=False)
    """The pod's uid, which no view changes: it is read several times for each report."""

    def __post_init__(self) -> None:
        self.uid = self.view.uid

    @property
    def is_dead(self) -> bool:
        """True if the pod is proven to run nothing, now or later."""
        return self.is_fenced or self.has_ended

    @property
    def state(self) -> AgentState | None:
        """State in the last report; None: no report."""
        return self.report.state if self.report else None

    @property
    def broke_early(self) -> bool:
        """True if workers that wait for their rank have ended before they had one.

        A stock agent that was ordered to start may have ignored the order for this reason: the
        attempt has failed, and no other one.
        """
        report = self.report
        if report is None or not _is_early_fault(report):
            return False
        return self.ordered is None or not is_stock(report)

    @property
    def early_attempt(self) -> int:
        """The attempt for which such workers were started: the one after the newest known."""
        report = self.report
        if report is None:
            return 0
        return self.asked_before + 1 if is_stock(report) else _next_attempt(report)

    @property
    def runs_unordered(self) -> bool:
        """True if a stock agent runs an attempt that this operator did not order from this agent
        process.

        Such an order was meant for the process before it, or came late from an earlier operator.
        """
        report = self.report
        if report is None or not is_stock(report) or self.ordered is not None:
            return False
        return report.state not in _BETWEEN_ATTEMPTS and not report.is_unstarted

    def was_stopped(self, report: AgentReport) -> bool:
        """True if a stock agent that looks new may have carried out its stop order."""
        return is_stock(report) and self.ordered is not None and self.asked >= self.ordered

    def attempt_of(self, report: AgentReport) -> int | None:
        """Return the attempt of a report; a stock agent's is the one that it was ordered to
        start."""
        return report.attempt if report.attempt is not None else self.ordered

    def lose(self, why: str) -> None:
        """Note that the agent cannot be reached."""
        self.lost_why, self.asked_when_lost = why or "the agent cannot be reached", self.asked

    def accept(self, report: AgentReport) -> bool:
        """Keep the report if it is newer, together with what it proves; return True if it was."""
        old = self.report
        if report.agent_id in self.past_agents:
            return False
        position = self._position(report)
        if old is not None and old.agent_id != report.agent_id:
            self.past_agents[old.agent_id] = None
            if len(self.past_agents) > PAST_AGENTS_KEPT:
                del self.past_agents[next(iter(self.past_agents))]
            # A stock agent that has restarted its processes on order looks like a new one. In both,
            # nothing of the attempts that it was ordered to stop is alive.
            asked = self.asked if is_stock(report) else -1
            before = min(asked, self.asked_when_lost) if self.lost_why else asked
            self.ordered, self.asked, self.asked_before = None, asked, before
            position = self._position(report)
        elif position < self.position and not is_stock(report):
            return False
        self.position = position
        self.report, self.lost_why, self.is_lease_over = report, "", False
        self._learn(report)
        return True

    def _position(self, report: AgentReport) -> ReportPosition:
        """Return the progress of the agent, which never goes back.

        In each state a port is offered once it is found, and workers at the barrier may be ended
        there.
        """
        of = report.newest_attempt if report.state in _BETWEEN_ATTEMPTS else self.attempt_of(report)
        if _is_early_fault(report) and not is_stock(report):
            of = _next_attempt(report)
        elif report.state is AgentState.STOPPING and report.attempt is None:
            of = report.newest_attempt if self.ordered is None else of
        has_port = report.offered_port is not None
        newest, state = -1 if of is None else of, _STATE_ORDER[report.state]
        return (newest, state, has_port, -len(report.kept), report.has_ended)

    def _learn(self, report: AgentReport) -> None:
        if report.state in _BETWEEN_ATTEMPTS:
            self.clear_through = max(self.clear_through, -1)
        if report.state is AgentState.READY or report.has_ended:
            if report.newest_attempt is not None:
                self.clear_through = max(self.clear_through, report.newest_attempt)
            elif is_stock(report):
                self.clear_through = max(self.clear_through, self.asked)
        elif report.state not in _BETWEEN_ATTEMPTS:
            attempt = self.attempt_of(report)
            if attempt is not None:
                self.clear_through = attempt - 1
            elif self.runs_unordered:
                # The stop orders that it received came before the start order that it follows.
                self.clear_through = UNHEARD


def address_of(member: Member | None) -> str:
    """Return `host:port` of the member's agent; empty: it has none yet."""
    if member is None or member.view.address is None:
        return ""
    address = member.view.address
    return f"{f'[{address}]' if ':' in address else address}:{member.view.agent_port}"


class Roster:
    """Pods by uid, name and node; nodes by name."""

    def __init__(self) -> None:
        self.members: dict[PodUid, Member] = {}
        self.nodes: dict[NodeName, NodeView] = {}
        self._names: dict[PodName, PodUid] = {}
        self._placed: dict[NodeName, dict[PodUid, Member]] = {}
        self._gone: dict[PodUid, None] = {}
        self.noticed: dict[NodeName, Notice] = {}
        """Nodes that will be lost, with their notice."""
        self.closing: set[NodeName] = set()
        """Noticed nodes that go so soon that no pod there may get a rank."""
        self.expired: set[NodeName] = set()
        """Noticed nodes that somebody waits for, and on which no pod may be any more."""

    def see_pod(self, view: PodView) -> Member | None:
        """Return the pod's record; None: the view is older than what is known."""
        if view.uid in self._gone:
            return None
        member = self.members.get(view.uid)
        if member is None:
            is_new = view.phase is PodPhase.PENDING
            member = Member(view, NEVER_ORDERED if is_new else UNHEARD)
            self.members[view.uid] = member
            self._names[view.name] = view.uid
        else:
            old = member.view
            is_back = old.is_deleting and not view.is_deleting
            is_back |= old.node is not None and old.node != view.node
            if is_back or _PHASE_ORDER[view.phase] < _PHASE_ORDER[old.phase]:
                return None
            # `has_ended` may be stale when the deletion is first seen. The node may have started a
            # container since, if it reaches the operator and not the API server.
            member.has_ended |= view.has_ended and old.is_deleting and not old.has_ended
            member.view = view
        if view.node is not None:
            self._placed.setdefault(view.node, {})[view.uid] = member
        return member

    def remove_pod(self, uid: PodUid) -> Member | None:
        """Forget the pod for good; return None if it was not known."""
        self._gone[uid] = None
        if len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        member = self.members.pop(uid, None)
        if member is None:
            return None
        if self._names.get(member.view.name) == uid:
            del self._names[member.view.name]
        if member.view.node is not None:
            self._placed[member.view.node].pop(uid, None)
        return member

    def named(self, name: PodName) -> Member | None:
        """Return the pod that has the name now."""
        uid = self._names.get(name)
        return None if uid is None else self.members.get(uid)

    def other_with(self, member: Member, report: AgentReport) -> Member | None:
        """Return another pod for which the same agent process answers; None: there is none.

        That happens to pods that share addresses: an agent that listens on all addresses of its
        machine also answers at those of the other pods there.
        """
        view, known = member.view, member.report
        is_same = known is not None and known.agent_id == report.agent_id
        if view.address is None or is_same or not is_stock(report):
            return None
        is_local = is_loopback(view.address)
        near = self.members if is_local else self._placed.get(view.node or NodeName(""), {})
        for other in near.values():
            address = other.view.address or ""
            is_near = address == view.address or (is_local and is_loopback(address))
            theirs = other.report
            is_theirs = theirs is not None and theirs.agent_id == report.agent_id
            if is_near and is_theirs and other is not member:
                return other
        return None

    def see_node(self, node: NodeView) -> None:
        """Take a node as the watch of nodes shows it."""
        self.nodes[node.name] = node
        if node.notice is not None:
            self.noticed[node.name] = node.notice
        else:
            self.noticed.pop(node.name, None)
        for member in self.on_node(node.name):
            member.has_no_node = False

    def remove_node(self, name: NodeName) -> None:
        """Note that the watch of nodes no longer shows the node."""
        self.nodes.pop(name, None)
        self.noticed.pop(name, None)
        for member in self.on_node(name):
            member.has_no_node = True

    def on_node(self, name: NodeName) -> list[Member]:
        """Return the pods placed on a node."""
        return list(self._placed.get(name, {}).values())

    def is_cut_off(self, member: Member) -> bool:
        """True if the pod's node is not ready, or proven to be fenced or removed; False for an
        unknown node."""
        node = self._node_of(member)
        return member.is_fenced or (node is not None and not node.is_ready)

    def is_out_of_reach(self, member: Member) -> bool:
        """True if the pod is out of reach together with its node.

        An agent that answers from a node that is not ready is not lost: only the node's own daemon
        is.
        """
        is_silent = bool(member.lost_why) or member.report is None
        return member.is_fenced or (is_silent and self.is_cut_off(member))

    def is_on_fenced(self, member: Member) -> bool:
        """True if the pod's node is reported as fenced or removed.

        That proves nothing: pods and nodes are watched by separate streams, and the news of the
        node may be older than the pod.
        """
        node = self._node_of(member)
        return member.has_no_node if node is None else node.is_fenced

    def must_be_left(self, member: Member) -> bool:
        """True if the pod's node runs but must not be used."""
        node = self._node_of(member)
        return node is not None and (not node.is_healthy or node.name in self.expired)

    def notice_of(self, member: Member) -> Notice | None:
        """Return the notice of the pod's node; None: it has none."""
        return None if member.view.node is None else self.noticed.get(member.view.node)

    def unusable_nodes(self) -> Iterable[NodeName]:
        """Return the nodes that no new pod should be placed on."""
        return (node.name for node in self.nodes.values() if not node.is_usable)

    def is_clear(self, member: Member, attempt: int) -> bool:
        """True if no worker of `attempt` or of an earlier one can live in the pod."""
        return member.clear_through >= attempt or member.is_dead

    def _node_of(self, member: Member) -> NodeView | None:
        return self.nodes.get(member.view.node) if member.view.node is not None else None


class Ranks:
    """Ranks 0..nnodes-1 of one job."""

    def __init__(self) -> None:
        self.pod_of: dict[int, PodUid] = {}
        self.rank_of: dict[PodUid, int] = {}
        self._spec_of: dict[int, str] = {}
        self._given: Counter[str] = Counter()
        self._specs: dict[str, ReplicaSpec] = {}
        self._order: dict[str, int] = {}
        self.nnodes = 0

    @property
    def is_full(self) -> bool:
        """True if every node rank has a pod."""
        return len(self.pod_of) == self.nnodes

    @property
    def is_unassigned(self) -> bool:
        """True if no rank has ever been given."""
        return not self._spec_of

    def reset(self, shape: Sequence[ReplicaSpec]) -> None:
        """Forget every rank; the job now has this shape."""
        self.pod_of.clear()
        self.rank_of.clear()
        self._spec_of.clear()
        self._given.clear()
        self._specs = {spec.name: spec for spec in shape}
        self._order = {spec.name: i for i, spec in enumerate(shape)}
        self.nnodes = sum(spec.replicas for spec in shape)

    def restore(self, member: Member, rank: int) -> bool:
        """Give the pod the rank that it reports; return False if it cannot have it."""
        spec = member.view.replica_spec
        is_taken = rank in self.pod_of or member.uid in self.rank_of
        if is_taken or not 0 <= rank < self.nnodes or self._room(spec) <= 0:
            return False
        self._give(rank, member)
        return True

    def release(self, uid: PodUid) -> int | None:
        """Free the pod's rank for another one."""
        rank = self.rank_of.pop(uid, None)
        if rank is not None:
            del self.pod_of[rank]
        return rank

    def fill(self, candidates: Iterable[Member], roster: Roster) -> None:
        """Give free ranks to pods that have none."""
        free: dict[str, list[int]] = {name: [] for name in self._specs}
        for rank in sorted(set(range(self.nnodes)) - self.pod_of.keys(), reverse=True):
            free.setdefault(self._spec_of.get(rank, ""), []).append(rank)
        unclaimed = free.get("", [])
        room = {name: self._room(name) for name in self._specs}
        unranked = [member for member in candidates if member.uid not in self.rank_of]
        for member in sorted(unranked, key=lambda member: self._place(member, roster)):
            name = member.view.replica_spec
            if free.get(name):
                self._give(free[name].pop(), member)
            elif unclaimed and room.get(name, 0) > 0:
                room[name] -= 1
                self._give(unclaimed.pop(), member)

    def _give(self, rank: int, member: Member) -> None:
        self.pod_of[rank] = member.uid
        self.rank_of[member.uid] = rank
        if rank not in self._spec_of:
            self._spec_of[rank] = member.view.replica_spec
            self._given[member.view.replica_spec] += 1

    def _room(self, name: str) -> int:
        """Return the number of ranks of the replica spec that no pod has had yet."""
        spec = self._specs.get(name)
        return 0 if spec is None else spec.replicas - self._given[name]

    def _place(self, member: Member, roster: Roster) -> tuple[tuple[str, ...], int, int]:
        node = roster.nodes.get(member.view.node) if member.view.node is not None else None
        order = self._order.get(member.view.replica_spec, len(self._order))
        return (node.topology if node else (), order, member.view.index)

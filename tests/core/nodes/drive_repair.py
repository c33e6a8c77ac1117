"""A small world for the repairer: nodes with faults, a provider, a checker, a late API.

Effects of one node are carried out in order, as the driver does. Their results are delivered later,
in order for each node, perhaps twice. A restart loses all events in progress in the repairer, and
the effects that it had not carried out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from unbroken.core.nodes.repair.events import (
    Answer,
    AskProvider,
    CheckSeen,
    ClusterSeen,
    DropRecord,
    MakeCheck,
    NodeFault,
    OrderRepair,
    OrderStatus,
    PatchNode,
    PodsSeen,
    ProviderAnswered,
    RecordGone,
    RecordRepairEvent,
    RecordSeen,
    RepairEffect,
    RepairEvent,
    RepairNode,
    RepairNodeGone,
    RepairNodeSeen,
    RepairOrder,
    RepairSettings,
    RepairSynced,
    WriteRecord,
    queue_of,
)
from unbroken.core.nodes.repair.machine import Repairer
from unbroken.core.tick import Tick
from unbroken.spec.keys import FENCE, HEALTH, REPAIR, VERIFIED
from unbroken.spec.nodes.kinds import CheckPhase, NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import Action, Health, NodeRecovery

BEGIN = 1_800_000_000.0


@dataclass
class Execution:
    """An action that the provider has really executed."""

    node: str
    action: Action
    boot_id: str
    has_failed: bool


@dataclass
class World:
    """Nodes `node-0`, ... of one cluster; `outcome` says how an order ends: see `_execute`."""

    settings: RepairSettings = field(default_factory=RepairSettings)
    now: float = BEGIN
    outcome: Callable[[RepairOrder], str] = lambda order: "done"
    check: Callable[[str], CheckPhase] = lambda node: CheckPhase.PASSED
    nodes: dict[str, RepairNode] = field(default_factory=dict)
    records: dict[str, NodeRecordSpec] = field(default_factory=dict)
    checks: dict[str, CheckSeen] = field(default_factory=dict)
    pods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    recovery: NodeRecovery | None = None
    """Recovery of the cluster `c`, to which all nodes belong; None: there is no such Cluster."""
    executions: list[Execution] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of times that a person ordered an action, by node and action."""
    orders: dict[str, str] = field(default_factory=dict)
    """Outcome of each order by identity."""
    effects: list[RepairEffect] = field(default_factory=list)
    """All ordered effects."""
    events: deque[RepairEvent] = field(default_factory=deque)
    todo: dict[str, deque[RepairEffect]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Nodes whose machine is gone."""
    boots: int = 0
    joins_held_back: bool = True
    """True if a machine to be tested joins with the taint."""

    def __post_init__(self) -> None:
        self.repairer = Repairer(self.settings)

    def add(self, *names: str, rack: str = "") -> None:
        """Add healthy nodes."""
        for name in names:
            self.change(RepairNode(name, True, self.now, boot_id=self._boot(), rack=rack))

    def _boot(self) -> str:
        self.boots += 1
        return f"boot-{self.boots}"

    def change(self, node: RepairNode) -> None:
        """Replace the state of a node, and queue the event."""
        node = replace(node, cluster="c")
        self.nodes[node.name] = node
        self.events.append(RepairNodeSeen(node))

    def remove(self, name: str) -> None:
        """Delete a node's object."""
        self.nodes.pop(name, None)
        self.events.append(RepairNodeGone(name))

    def start(self) -> None:
        """Start a repairer, new or after another, and give it all objects."""
        self.repairer = Repairer(self.settings)
        self.todo.clear()
        self.events.clear()
        listed: list[RepairEvent] = [RepairNodeSeen(node) for node in self.nodes.values()]
        listed += [RecordSeen(name, record) for name, record in self.records.items()]
        listed += [PodsSeen(name, pods) for name, pods in self.pods.items()]
        listed += self.checks.values()
        if self.recovery is not None:
            listed.append(ClusterSeen("c", self.recovery))
        for event in (*listed, RepairSynced()):
            self.tell(event)

    def tell(self, event: RepairEvent) -> list[RepairEffect]:
        """Give the repairer an event, and queue its effects."""
        ordered = self.repairer.step(event, self.now)
        self.effects += ordered
        for effect in ordered:
            self.todo.setdefault(queue_of(effect), deque()).append(effect)
        return ordered

    def deliver(self) -> bool:
        """Give the repairer the oldest event; return False if there is none."""
        if not self.events:
            return False
        self.tell(self.events.popleft())
        return True

    def carry_out(self, name: str | None = None) -> bool:
        """Carry out the oldest effect of a node, or of the first node that has one."""
        names = [name] if name else [one for one, queue in self.todo.items() if queue]
        if not names or not self.todo.get(names[0]):
            return False
        self._do(self.todo[names[0]].popleft())
        return True

    def settle(self) -> None:
        """Run until no event or effect is in progress."""
        for _ in range(2000):
            if not (self.carry_out() or self.deliver()):
                return
        raise AssertionError(f"no end of it: {self.effects[-10:]}")

    def wait(self, seconds: float) -> None:
        """Let time pass, with all deadlines and events in it."""
        end = self.now + seconds
        self.settle()
        for _ in range(20000):
            due = self.repairer.deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.tell(Tick())
            self.settle()
            again = self.repairer.deadline()
            assert again is None or again > self.now, "time stands still"
        else:
            raise AssertionError("no end of it")
        self.now = end

    # Actions of people and daemons, and accidents.

    def fault(self, name: str, reason: str = "Xid79", action: Action = Action.REBOOT) -> None:
        """Report a fault as the daemon does."""
        health = Health.PENDING_REPLACEMENT if action is Action.REPLACE else Health.PENDING_REBOOT
        node = self.nodes[name]
        fault = NodeFault("NvidiaGPUUnhealthy", reason, self.now, "bad")
        self.change(
            replace(
                node,
                health=health,
                has_taint=True,
                faults=(fault,),
                fault_reason=reason,
                advice=action.value,
            )
        )

    def silence(self, name: str) -> None:
        """Let the node fall silent."""
        self.change(replace(self.nodes[name], is_ready=False, is_silent=True, ready_at=self.now))

    def speak(self, name: str) -> None:
        """Let the node report again, in the same boot; if its machine is gone, by another one."""
        node = self.nodes[name]
        boot = self._boot() if name in self.left else node.boot_id
        self.left.discard(name)
        self.change(replace(node, is_ready=True, is_silent=False, ready_at=self.now, boot_id=boot))

    def join_late(self, name: str) -> None:
        """Let the machine of a `late` order join after all."""
        held = RepairNode(name, True, self.now, boot_id=self._boot())
        self.change(replace(held, health=Health.UNSCHEDULABLE, has_taint=True))

    def order(self, name: str, what: str) -> None:
        """Write the annotation of a person's order."""
        self.asked[name, what] += 1
        self.change(replace(self.nodes[name], order=what))

    def clear(self, name: str) -> None:
        """Grant the appeal, as a person does."""
        self.records[name] = replace(self.records[name], cleared_at=self.now, cleared_by="me: ok")
        self.events.append(RecordSeen(name, self.records[name]))

    # Results of effects.

    def _do(self, effect: RepairEffect) -> None:
        match effect:
            case WriteRecord(name, record):
                old = self.records.get(name, NodeRecordSpec())
                self.records[name] = replace(
                    record, cleared_at=old.cleared_at, cleared_by=old.cleared_by
                )
                self.events.append(RecordSeen(name, self.records[name]))
            case PatchNode():
                self._patch(effect)
            case OrderRepair(order) | AskProvider(order):
                self.events.append(ProviderAnswered(order, self._execute(order)))
            case MakeCheck(_, name, spec):
                phase = self.check(spec.nodes[0])
                faulty = spec.nodes if phase is CheckPhase.FAILED else ()
                self.checks[name] = CheckSeen(name, phase, "tested", faulty)
                self.events.append(self.checks[name])
            case DropRecord(name):
                del self.records[name]
                self.events.append(RecordGone(name))
            case RecordRepairEvent():
                pass

    def _patch(self, patch: PatchNode) -> None:
        node = self.nodes.get(patch.node)
        if node is None:
            return
        if HEALTH in patch.labels:
            node = replace(node, health=Health(patch.labels[HEALTH]))
        if patch.taint is not None:
            node = replace(node, has_taint=patch.taint)
        if patch.is_out_of_service is not None:
            awaited = node.is_awaited and not patch.is_out_of_service
            node = replace(node, is_fenced=patch.is_out_of_service, is_awaited=awaited)
        if FENCE in patch.annotations:
            node = replace(node, is_fence_asked=False, is_awaited=False)
        if REPAIR in patch.annotations:
            node = replace(node, order="")
        if VERIFIED in patch.annotations:
            # The daemon takes its condition back.
            verified = patch.annotations[VERIFIED] or ""
            node = replace(node, verified=verified, faults=(), fault_reason="", advice="")
        self.change(node)

    def _execute(self, order: RepairOrder) -> OrderStatus:
        """Execute an order with one of the outcomes.

        They are done, failed, unsupported, gone, `never` (the node does not come back), `stuck`,
        `late`: the replacement is known, but has not joined, or `left`: the machine is gone, and
        its Node object is not.
        """
        is_new = order.id not in self.orders
        outcome = self.orders.setdefault(order.id, self.outcome(order))
        if outcome in ("failed", "unsupported"):
            if is_new and outcome == "failed":
                self.executions.append(Execution(order.node, order.action, order.boot_id, True))
            return OrderStatus(Answer(outcome), f"the provider says {outcome}")
        if outcome == "stuck":
            return OrderStatus(Answer.WORKING, "still at it")
        if outcome == "late":
            return OrderStatus(Answer.WORKING, "it is being made", f"{order.node}-x")
        replacement = f"{order.node}-x" if order.action is Action.REPLACE else ""
        if is_new:
            self.executions.append(Execution(order.node, order.action, order.boot_id, False))
            self._happen(order, outcome, replacement)
        if outcome in ("gone", "left"):
            return OrderStatus(Answer.GONE, "nothing of it runs")
        return OrderStatus(Answer.DONE, replacement=replacement)

    def _happen(self, order: RepairOrder, outcome: str, replacement: str) -> None:
        node = self.nodes.get(order.node)
        if outcome == "left":
            self.left.add(order.node)
            if node is not None:
                self.silence(order.node)
            return
        if order.action is Action.REPLACE:
            self.remove(order.node)
            if outcome == "done":
                self.change(self._joined(order, replacement))
        elif outcome == "never" and node is not None:
            self.change(replace(node, is_ready=False, is_silent=True, ready_at=self.now))
        elif node is not None:
            boot = self._boot() if order.action is Action.REBOOT else node.boot_id
            self.change(
                replace(node, is_ready=True, is_silent=False, ready_at=self.now, boot_id=boot)
            )

    def _joined(self, order: RepairOrder, name: str) -> RepairNode:
        """Return a node as the provider of Machines lets it join."""
        found = RepairNode(name, True, self.now, boot_id=self._boot())
        if not (order.is_tested and self.joins_held_back):
            return found
        return replace(found, health=Health.UNSCHEDULABLE, has_taint=True)

    # Views for tests.

    def told(self) -> list[str]:
        """Return the reasons of all events."""
        return [effect.reason for effect in self.effects if isinstance(effect, RecordRepairEvent)]

    def done(self) -> list[tuple[str, Action]]:
        """Return the actions that the provider has executed without failure."""
        return [(one.node, one.action) for one in self.executions if not one.has_failed]

    def state(self, name: str) -> RepairState | None:
        """Return the state of the repair under way, as written."""
        repair = self.records.get(name, NodeRecordSpec()).repair
        return repair and repair.state

    def message(self, name: str) -> str:
        """Return the message of the repair under way."""
        repair = self.records[name].repair
        assert repair is not None
        return repair.message


def world(count: int = 5, **given: object) -> World:
    """Start a world of healthy nodes; `given` are settings or fields of the world by name."""
    fields = {
        key: given.pop(key)
        for key in ("outcome", "check", "recovery", "joins_held_back")
        if key in given
    }
    found = World(RepairSettings(**given), **fields)  # type: ignore[arg-type]
    found.add(*(f"node-{index}" for index in range(count)))
    found.start()
    return found


def outcomes(words: Iterable[str]) -> Callable[[RepairOrder], str]:
    """Return a function that gives these outcomes in turn; the last one is repeated."""
    left = list(words)
    return lambda order: left.pop(0) if len(left) > 1 else left[0]

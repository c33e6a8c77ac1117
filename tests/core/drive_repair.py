"""A small world for the repairer: nodes that break, a provider, a checker, an API that is late.

Effects of one node are carried out in order, as the driver does; what comes of them is told later,
in order for each node, perhaps twice.  A restart loses all that is under way in the repairer, and
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
from unbroken.spec.keys import HEALTH, REPAIR, VERIFIED
from unbroken.spec.nodes.check import CheckPhase
from unbroken.spec.nodes.record import NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import Action, Health, Recovery

BEGIN = 1_800_000_000.0


@dataclass
class Execution:
    """What the provider has really done."""

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
    recovery: Recovery | None = None
    """Of the cluster `c`, to which all nodes belong; None: there is no such Cluster."""
    executions: list[Execution] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of times that a person ordered an action, by node and action."""
    orders: dict[str, str] = field(default_factory=dict)
    """Outcome of each order by identity."""
    effects: list[RepairEffect] = field(default_factory=list)
    """All that were ordered."""
    events: deque[RepairEvent] = field(default_factory=deque)
    todo: dict[str, deque[RepairEffect]] = field(default_factory=dict)
    boots: int = 0
    joins_held_back: bool = True
    """Whether the provider has what is to be tested join with the taint."""

    def __post_init__(self) -> None:
        self.repairer = Repairer(self.settings)

    def add(self, *names: str, rack: str = "") -> None:
        """Nodes that are well."""
        for name in names:
            self.change(RepairNode(name, True, self.now, boot_id=self._boot(), rack=rack))

    def _boot(self) -> str:
        self.boots += 1
        return f"boot-{self.boots}"

    def change(self, node: RepairNode) -> None:
        """A node is so now; its news is on its way."""
        node = replace(node, cluster="c")
        self.nodes[node.name] = node
        self.events.append(RepairNodeSeen(node))

    def remove(self, name: str) -> None:
        """A node's object is deleted."""
        self.nodes.pop(name, None)
        self.events.append(RepairNodeGone(name))

    def start(self) -> None:
        """A repairer, new or after another, is told all that there is."""
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
        """Give the repairer an event, and queue what it orders."""
        ordered = self.repairer.step(event, self.now)
        self.effects += ordered
        for effect in ordered:
            self.todo.setdefault(queue_of(effect), deque()).append(effect)
        return ordered

    def deliver(self) -> bool:
        """Tell the oldest news; False: there is none."""
        if not self.events:
            return False
        self.tell(self.events.popleft())
        return True

    def carry_out(self, name: str | None = None) -> bool:
        """Carry out the oldest effect of a node, or of the first that has one."""
        names = [name] if name else [one for one, queue in self.todo.items() if queue]
        if not names or not self.todo.get(names[0]):
            return False
        self._do(self.todo[names[0]].popleft())
        return True

    def settle(self) -> None:
        """Until nothing is under way."""
        for _ in range(2000):
            if not (self.carry_out() or self.deliver()):
                return
        raise AssertionError(f"no end of it: {self.effects[-10:]}")

    def wait(self, seconds: float) -> None:
        """Let time go on, with all that comes of it."""
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

    # What people, daemons and misfortune do.

    def fault(self, name: str, reason: str = "Xid79", action: Action = Action.REBOOT) -> None:
        """The daemon says so."""
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
        """The node is not heard of any more."""
        self.change(replace(self.nodes[name], is_ready=False, is_silent=True, ready_at=self.now))

    def speak(self, name: str) -> None:
        """It is heard of again, in the same boot."""
        self.change(replace(self.nodes[name], is_ready=True, is_silent=False, ready_at=self.now))

    def join_late(self, name: str) -> None:
        """What a `late` order was about joins after all."""
        held = RepairNode(name, True, self.now, boot_id=self._boot())
        self.change(replace(held, health=Health.UNSCHEDULABLE, has_taint=True))

    def order(self, name: str, what: str) -> None:
        """A person's annotation."""
        self.asked[name, what] += 1
        self.change(replace(self.nodes[name], order=what))

    def clear(self, name: str) -> None:
        """A person grants the appeal."""
        self.records[name] = replace(self.records[name], cleared_at=self.now, cleared_by="me: ok")
        self.events.append(RecordSeen(name, self.records[name]))

    # What effects do.

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
        if REPAIR in patch.annotations:
            node = replace(node, order="")
        if VERIFIED in patch.annotations:
            # The daemon takes its condition back.
            verified = patch.annotations[VERIFIED] or ""
            node = replace(node, verified=verified, faults=(), fault_reason="", advice="")
        self.change(node)

    def _execute(self, order: RepairOrder) -> OrderStatus:
        """One of: done, failed, unsupported, gone, `never` (it does not come back), `stuck`, or
        `late`: what takes the place is known, and not there."""
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
        if outcome == "gone":
            return OrderStatus(Answer.GONE, "nothing of it runs")
        return OrderStatus(Answer.DONE, replacement=replacement)

    def _happen(self, order: RepairOrder, outcome: str, replacement: str) -> None:
        node = self.nodes.get(order.node)
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
        """As the provider of Machines has it join."""
        found = RepairNode(name, True, self.now, boot_id=self._boot())
        if not (order.is_tested and self.joins_held_back):
            return found
        return replace(found, health=Health.UNSCHEDULABLE, has_taint=True)

    # What tests look at.

    def told(self) -> list[str]:
        """Reasons of the events so far."""
        return [effect.reason for effect in self.effects if isinstance(effect, RecordRepairEvent)]

    def done(self) -> list[tuple[str, Action]]:
        """What the provider has done."""
        return [(one.node, one.action) for one in self.executions if not one.has_failed]

    def state(self, name: str) -> RepairState | None:
        """Of the repair under way, as it is written."""
        repair = self.records.get(name, NodeRecordSpec()).repair
        return repair and repair.state

    def message(self, name: str) -> str:
        """Of the repair under way."""
        repair = self.records[name].repair
        assert repair is not None
        return repair.message


def world(count: int = 5, **given: object) -> World:
    """A started world of nodes that are well; settings or fields of the world by name."""
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
    """Orders end so, one after another; the last word stays."""
    left = list(words)
    return lambda order: left.pop(0) if len(left) > 1 else left[0]

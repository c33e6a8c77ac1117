"""The repairer: the decisions about nodes at fault. docs/design/nodes.md has the rules.

One machine handles all nodes. All lasting state is on the Nodes, in their NodeRecords or at the
provider, so that a new repairer continues where another has ended. Without automatic recovery it
writes only records, until a person orders a repair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from unbroken.core.nodes import blame
from unbroken.spec.keys import FENCE, GPU_UNHEALTHY, HARDWARE_UNHEALTHY, HEALTH, REPAIR
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action, Health

from .course import BY_HAND, NOT_AUTOMATIC, RepairCourse
from .desk import RepairDesk
from .events import (
    Blamed,
    DropRecord,
    PatchNode,
    ProviderAnswered,
    RepairEffect,
    RepairEvent,
    RepairNode,
    RepairNodeGone,
    RepairSettings,
    RepairSynced,
)
from .facts import RepairFacts
from .records import (
    begun,
    held_back,
    is_cleared,
    is_forgotten,
    kept_time,
    other_machine,
    with_message,
    withdrawn,
)
from .rules import (
    ACTIVE,
    APPEAL,
    ORDERS,
    PENDING,
    PERSON,
    Need,
    action_of,
    entry_rung,
    is_in_probation,
    lost_at,
    need_of,
    obstacle,
    retry_at,
    rung,
    supported,
)

LABELLED = (GPU_UNHEALTHY, HARDWARE_UNHEALTHY)
ROUNDS_MAX = 12
"""Upper bound of the states that a node's repair passes through at one event."""


class Repairer:
    """The repairs of all nodes."""

    def __init__(self, settings: RepairSettings) -> None:
        self._settings = settings
        self._facts = RepairFacts(settings)
        self._desk = RepairDesk(settings, self._facts)
        self._course = RepairCourse(settings, self._facts, self._desk)
        self._due: dict[str, float] = {}
        self._asked_in_silence: set[str] = set()
        """Nodes whose fence was asked for while they were not ready."""
        self._early: list[Blamed] = []
        """Incidents that came before all records were known."""

    def deadline(self) -> float | None:
        """Return when to `step` with a Tick; None: time alone changes nothing."""
        return min(self._due.values(), default=None)

    def step(self, event: RepairEvent, now: float) -> list[RepairEffect]:
        """Take an event; return the orders, in this order for each node."""
        touched = list(self._facts.take(event))
        match event:
            case RepairSynced():
                self._forget_long_gone(now)
            case ProviderAnswered(order, _) if touched:
                self._course.answered(order, now)
            case RepairNodeGone(name):
                self._desk.forget(name)
                self._course.forget(name)
                self._asked_in_silence.discard(name)
            case Blamed(name):
                self._early.append(event)
                touched = [name]
            case _:
                pass
        if self._facts.is_synced:
            for blamed in self._early:
                self._blame(blamed, now)
            self._early = []
            due = [name for name, at in self._due.items() if at <= now]
            for name in dict.fromkeys((*touched, *due)):
                self._look(name, now)
            for name in self._facts.waiting():
                self._admit(name, now)
            for name in self._desk.admitted():
                self._look(name, now)
        result, self._desk.out = self._desk.out, []
        return result

    def record(self, name: str) -> NodeRecordSpec:
        """Return the record of a node, as it was last ordered to be written."""
        return self._facts.record(name)

    def _forget_long_gone(self, now: float) -> None:
        for name, record in list(self._facts.records.items()):
            if name not in self._facts.nodes and is_forgotten(record, now):
                del self._facts.records[name]
                self._desk.out.append(DropRecord(name))

    def _look(self, name: str, now: float) -> None:
        """Advance one node as far as possible."""
        for _ in range(ROUNDS_MAX):
            before = self._facts.record(name)
            self._go_on(name, now)
            if self._facts.record(name) == before:
                break
        due = min((at for at in self._moments(name) if now < at < math.inf), default=None)
        self._due.pop(name, None)
        if due is not None:
            self._due[name] = due

    def _moments(self, name: str) -> Iterator[float]:
        repair, node = self._facts.record(name).repair, self._facts.nodes.get(name)
        if repair is not None:
            yield from self._course.moments(name, repair)
        elif node is not None:
            yield lost_at(self._waited_for(node), self._settings)

    def _waited_for(self, node: RepairNode) -> RepairNode:
        """Return the node; its fence is awaited only while pods of jobs are there."""
        has_pods = bool(self._facts.pods.get(node.name))
        return replace(node, is_awaited=node.is_awaited and has_pods)

    def _go_on(self, name: str, now: float) -> None:
        node = self._facts.nodes.get(name)
        is_news = node is not None and self._desk.is_news(node)
        if node is not None and is_news:
            if self._lift_fence(node):
                return
            self._hold_against(node, now)
            self._take_order(node)
            if node.unknown_health:
                known = ", ".join(health.value for health in Health)
                text = f"{HEALTH}: {node.unknown_health!r} asks for nothing; write one of {known}"
                self._desk.warn_once(node.name, "HealthUnknown", text)
            self._match_taint(node)
        if node is not None and self._settings.notes_machines:
            self._note_machine(node)
        repair = self._facts.record(name).repair
        if repair is None:
            if node is not None and is_news:
                self._notice(node, now)
        elif repair.state is RepairState.WAITING:
            self._wait(name, repair, now)
        elif self._settings.is_dry_run and repair.state in ACTIVE:
            self._desk.set_message(name, "dry run: what was begun is left as it is")
        else:
            self._course.advance(name, repair, now)

    def _match_taint(self, node: RepairNode) -> None:
        """Move the taint with the label `node-health-status`, which a person may set by hand."""
        record = self._facts.record(node.name)
        is_under_repair = record.repair is not None and record.repair.state in ACTIVE
        is_wanted = node.health is not Health.SCHEDULABLE
        is_right = node.health is None or node.has_taint == is_wanted
        if is_right or is_under_repair or self._settings.is_dry_run:
            return
        if is_wanted or record.quarantined_at is None:
            self._desk.patch(node, PatchNode(node.name, taint=is_wanted))

    def _lift_fence(self, node: RepairNode) -> bool:
        """Remove a fence, and the request for one, from a node that is back.

        A request that a ready node gets is a person's, and stays for whoever carries it out. Return
        True if another machine has taken the name of one whose repair is over.
        """
        if not node.is_fence_asked:
            self._asked_in_silence.discard(node.name)
        elif not node.is_ready:
            self._asked_in_silence.add(node.name)
        if not node.is_ready:
            return False
        is_over = node.name in self._asked_in_silence
        if not (is_over or node.is_fenced) or self._settings.is_dry_run:
            return False
        asked = {FENCE: None} if is_over else {}
        lifted = False if node.is_fenced else None
        self._desk.patch(node, PatchNode(node.name, {}, asked, is_out_of_service=lifted))
        is_repaired = self._facts.record(node.name).repair is None
        is_replaced = is_repaired and node.is_fenced and node.health in PENDING
        if is_replaced:
            self._desk.give_back(node.name, node, node.boot_id, is_kept=False)
        return is_replaced

    # Facts seen of a node.

    def _note_machine(self, node: RepairNode) -> None:
        """Note the machine of a node that has joined; warn if the node names another one later."""
        record = self._facts.record(node.name)
        if node.uid != record.node_uid:
            if node.has_joined:
                noted = replace(record, node_uid=node.uid, machine=node.machine)
                self._desk.write(node.name, noted)
        elif node.machine != record.machine:
            self._desk.warn_once(node.name, "MachineChanged", other_machine(record, node.machine))

    def _hold_against(self, node: RepairNode, now: float) -> None:
        """Add faults and losses to the node's blame, also if a person repairs it. Those since an
        order are caused by it."""
        record = self._facts.record(node.name)
        repair = record.repair
        until = math.inf
        if repair is not None and repair.acted_at is not None:
            until = repair.acted_at
        for fault in node.faults:
            # The daemon labels the action of its conditions; until then they cannot be weighed.
            is_weighed = fault.type not in LABELLED or node.health in PENDING
            if fault.at > until or not is_weighed:
                continue
            action = action_of(node)
            action = Action.REBOOT if action is Action.NONE else action
            entry = blame.of_fault(fault.at, fault.reason, fault.text, action)
            added = blame.add(record, entry, now)
            if added is not record and is_in_probation(record, fault.at):
                relapse = blame.of_relapse(fault.at, fault.reason, "soon after a repair")
                added = blame.add(added, relapse, now)
            record = added
        if node.is_silent and node.ready_at <= until:
            record = blame.add(record, blame.of_loss(node.ready_at, "the node went silent"), now)
        self._desk.write(node.name, record)

    def _blame(self, event: Blamed, now: float) -> None:
        """Add an incident to the blame of a known node; nodes that are long gone are ignored."""
        if event.node in self._facts.nodes or event.node in self._facts.records:
            record = self._facts.record(event.node)
            self._desk.write(event.node, blame.add_incident(record, event.entry, now))

    def _notice(self, node: RepairNode, now: float) -> None:
        """Begin a repair if a node without one needs it."""
        record, settings = self._facts.record(node.name), self._settings
        if is_cleared(record):
            if not settings.is_dry_run:
                self._begin_burn_in(node, now)
            return
        shown = replace(self._waited_for(node), order=self._desk.order_on(node))
        need = need_of(shown, record, self._facts.recovery(node), settings, now)
        if need is not None:
            self._begin(node, need, now)
        elif not self._desk.is_automatic(node):
            return
        elif record.quarantined_at is None:
            reason = self._desk.suspicion(record, now)
            if reason and self._desk.may_quarantine(node.name, reason):
                self._desk.quarantine(node.name, reason, now)
        elif not settings.is_dry_run:
            is_out = node.health in (*PENDING, Health.UNSCHEDULABLE) and node.has_taint
            if not is_out:
                self._desk.patch(node, held_back(node.name))

    def _begin_burn_in(self, node: RepairNode, now: float) -> None:
        need = Need(Action.NONE, "burn-in before the node leaves quarantine", APPEAL)
        record = begun(self._facts.record(node.name), need, Action.NONE, now)
        self._desk.record_event(node.name, "BurnInBegins", f"cleared by {record.cleared_by}")
        self._course.start_check(node.name, record, node.name, now)

    def _begin(self, node: RepairNode, need: Need, now: float) -> None:
        """Begin a needed repair; `_admit` decides when it starts."""
        record = self._facts.record(node.name)
        wanted, is_relapse = entry_rung(need, record, now)
        action = supported(wanted, self._settings.supports)
        relapse = f"{need.reason}, again after a repair"
        if action is None and is_relapse and self._desk.may_quarantine(node.name, relapse):
            self._desk.quarantine(node.name, relapse, now)
            return
        if need.asked_by == PERSON:
            action = wanted if wanted in self._settings.supports else None
        record = begun(record, need, action or wanted, now)
        if action is None:
            provider = self._settings.provider
            record = with_message(record, f"the provider {provider} cannot {wanted.value}{BY_HAND}")
        self._desk.write(node.name, record)
        again = ", again within the probation" if is_relapse else ""
        text = f"{(action or wanted).value}: {need.reason}{again}"
        self._desk.record_event(node.name, "RepairNeeded", text, is_warning=True)

    def _take_order(self, node: RepairNode) -> None:
        """Take a person's order, or a worse label, during a repair: more may be needed."""
        repair, order = self._facts.record(node.name).repair, self._desk.order_on(node)
        ordered = ORDERS.get(order)
        if order and ordered is None:
            text = f'{REPAIR}: "{order}" is none of {", ".join(ORDERS)}'
            self._desk.warn_once(node.name, "RepairUnknown", text)
        if repair is None or self._settings.is_dry_run:
            return
        if ordered is not None:
            self._join_order(node, repair, ordered)
        elif repair.asked_by not in (PERSON, APPEAL) and rung(action_of(node)) > rung(
            repair.action
        ):
            self._raise(node, repair, action_of(node))

    def _join_order(self, node: RepairNode, repair: RepairRecord, ordered: Action) -> None:
        if repair.state is RepairState.WAITING:
            self._course.ask_again(node.name)
            if (repair.asked_by, repair.action) != (PERSON, ordered):
                repair_record = replace(
                    repair,
                    action=ordered,
                    asked_by=PERSON,
                    reason=f"ordered: {node.order}",
                    message="",
                    tries=0,
                )
                self._desk.write(
                    node.name, replace(self._facts.record(node.name), repair=repair_record)
                )
        elif rung(ordered) <= rung(repair.action):
            # It requires no more than the repair under way.
            self._desk.patch(node, PatchNode(node.name, annotations={REPAIR: None}))
        else:
            self._raise(node, repair, ordered)

    def _raise(self, node: RepairNode, repair: RepairRecord, action: Action) -> None:
        """Raise a repair that has not been ordered yet: more is needed."""
        if repair.state not in (RepairState.WAITING, RepairState.DRAINING):
            return
        record = self._facts.record(node.name)
        self._desk.write(node.name, replace(record, repair=replace(repair, action=action)))
        if repair.state is RepairState.DRAINING:
            self._desk.patch(node, withdrawn(node.name, action))

    # The turn of a repair.

    def _wait(self, name: str, repair: RepairRecord, now: float) -> None:
        """Advance a waiting repair, or end it if it is no longer to be made."""
        node = self._facts.nodes.get(name)
        if node is None:
            self._course.end(name, RepairState.DONE, "its node is gone", now)
        elif not self._course.may_go_on(node, repair):
            is_off = not self._desk.is_automatic(node)
            text = NOT_AUTOMATIC if is_off else "no longer needed"
            self._course.end(name, RepairState.DONE, text, now)
        elif self._was_done(node, repair):
            done = replace(repair, acted_at=kept_time(now))
            record = replace(self._facts.record(name), repair=done)
            self._course.start_check(name, record, name, now)

    def _was_done(self, node: RepairNode, repair: RepairRecord) -> bool:
        """True if a person has made the repair, or an order that was reported as failed has."""
        is_other_boot = bool(repair.boot_id) and node.boot_id != repair.boot_id
        return is_other_boot and node.is_ready and not self._settings.is_dry_run

    def _admit(self, name: str, now: float) -> None:
        """Start a waiting repair if no obstacle remains."""
        record, node = self._facts.record(name), self._facts.nodes.get(name)
        repair, settings = record.repair, self._settings
        if node is None or repair is None or repair.state is not RepairState.WAITING:
            return
        if settings.is_dry_run:
            self._desk.set_message(name, f"dry run: would {repair.action.value} the node")
            text = f"would {repair.action.value} the node: {repair.reason}"
            self._desk.warn_once(name, "RepairDryRun", text)
        elif self._course.is_for_a_person(name, repair, now):
            if not repair.boot_id and node.boot_id:
                # The boot ID later shows that the person has made it.
                seen = replace(repair, boot_id=node.boot_id)
                self._desk.write(name, replace(record, repair=seen))
        elif retry_at(record, settings) > now:
            self._due[name] = retry_at(record, settings)
        else:
            facts = self._facts
            active, out = facts.active(), facts.out_of_service()
            why = obstacle(node, repair, facts.nodes, active, out, settings)
            if why:
                self._desk.set_message(name, why)
            else:
                self._let_begin(node, repair, now)

    def _let_begin(self, node: RepairNode, repair: RepairRecord, now: float) -> None:
        drained = replace(
            repair,
            state=RepairState.DRAINING,
            withdrawn_at=kept_time(now),
            boot_id=node.boot_id,
            message="jobs move off",
        )
        record = replace(self._facts.record(node.name), repair=drained)
        self._desk.write(node.name, record)
        self._desk.patch(node, withdrawn(node.name, repair.action))
        self._look(node.name, now)

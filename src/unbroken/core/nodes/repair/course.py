"""The course of a repair that has begun: drained, ordered, back, tested, over; or failed.

An order is in the record before it is sent, and has an identity by which the provider recognises
it. A repairer that takes over sends the same order, which is carried out once. A node is back in
service before its record says that the repair is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from unbroken.core.nodes import blame
from unbroken.core.wording import counted
from unbroken.spec.nodes.kinds import (
    CheckKind,
    CheckPhase,
    NodeCheckSpec,
    NodeRecordSpec,
    RepairRecord,
    RepairState,
)
from unbroken.spec.nodes.values import Action, Health

from .desk import RepairDesk
from .events import (
    Answer,
    AskProvider,
    MakeCheck,
    OrderRepair,
    OrderStatus,
    PatchNode,
    RepairNode,
    RepairOrder,
    RepairSettings,
)
from .facts import RepairFacts
from .records import begun, ended, freed, held_back, kept_time, with_message
from .rules import (
    APPEAL,
    PERSON,
    Need,
    is_still_needed,
    limit_seconds,
    order_of,
    refused_seconds,
    retry_at,
    rung_above,
)

NOT_AUTOMATIC = "NodeRecovery is None now"
BY_HAND = "; do it by hand: it goes on when the node is back from it"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A provider's refusal, and the number of refusals in a row."""

    action: Action
    times: int
    until: float
    """Time at which the provider is asked again."""


class RepairCourse:
    """Advances repairs; a new repairer asks the provider at once, whatever it has answered
    before."""

    def __init__(self, settings: RepairSettings, facts: RepairFacts, desk: RepairDesk) -> None:
        self._settings = settings
        self._facts = facts
        self._desk = desk
        self._asked: dict[str, tuple[str, float]] = {}
        """Identity of each node's order, and when to ask again; inf: an answer is awaited."""
        self._made: set[str] = set()
        """Checks that were requested."""
        self._refused: dict[str, Refusal] = {}
        """The provider's refusal by node."""

    def answered(self, order: RepairOrder, now: float) -> None:
        """Note that the provider has answered: it is asked again later."""
        self._asked[order.node] = (order.id, now + self._settings.ask_seconds)

    def forget(self, name: str) -> None:
        """Forget the node: it is gone."""
        self._refused.pop(name, None)

    def is_for_a_person(self, name: str, repair: RepairRecord, now: float) -> bool:
        """True if the provider cannot make the repair, as far as is known."""
        if repair.action not in self._settings.supports:
            return True
        refusal = self._refused.get(name)
        return refusal is not None and refusal.action is repair.action and now < refusal.until

    def ask_again(self, name: str) -> None:
        """Ask the provider again at a person's request, although it has refused: something may have
        changed."""
        self._refused.pop(name, None)

    def may_go_on(self, node: RepairNode, repair: RepairRecord) -> bool:
        """True if a repair that is not yet ordered is still to be made."""
        if repair.asked_by in (PERSON, APPEAL):
            return True
        return self._desk.is_automatic(node) and is_still_needed(node, repair, self._settings)

    def advance(self, name: str, repair: RepairRecord, now: float) -> None:
        """Advance the node's repair by one stage."""
        match repair.state:
            case RepairState.DRAINING:
                self._drain(name, repair, now)
            case RepairState.ACTING:
                self._act(name, repair, now)
            case RepairState.CHECKING:
                self._check(name, repair, now)
            case RepairState.DONE | RepairState.FAILED:
                # Another writer has written it: an ended repair is over.
                self.end(name, repair.state, repair.message, now)
            case RepairState.WAITING:
                pass

    def moments(self, name: str, repair: RepairRecord) -> Iterator[float]:
        """Yield the times at which the repair changes by itself."""
        settings = self._settings
        match repair.state:
            case RepairState.WAITING:
                yield retry_at(self._facts.record(name), settings)
                if refusal := self._refused.get(name):
                    yield refusal.until
            case RepairState.DRAINING:
                yield (repair.withdrawn_at or repair.began_at) + settings.drain_seconds
            case RepairState.ACTING:
                assert repair.acted_at is not None
                yield repair.acted_at + limit_seconds(repair.action, settings)
                yield self._asked.get(name, ("", math.inf))[1]
            case RepairState.CHECKING:
                yield self._check_limit(repair)
            case RepairState.DONE | RepairState.FAILED:
                pass

    def _drain(self, name: str, repair: RepairRecord, now: float) -> None:
        node = self._facts.nodes.get(name)
        if node is None:
            self.end(name, RepairState.DONE, "its node is gone", now)
            return
        if not self.may_go_on(node, repair):
            if not self._desk.is_automatic(node):
                self.end(name, RepairState.DONE, NOT_AUTOMATIC, now)
                return
            if self._desk.is_shown(node):
                self._desk.give_back(name, node, node.boot_id or "unharmed", is_kept=False)
                self.end(name, RepairState.DONE, "no longer needed", now)
                return
        since = repair.withdrawn_at or repair.began_at
        pods = self._facts.pods.get(name, ())
        # Pods of a node that is not ready cannot leave: its repair is what frees them.
        if pods and node.is_ready and now < since + self._settings.drain_seconds:
            self._desk.set_message(
                name, f"{counted(len(pods), 'pod')} of jobs must leave: {', '.join(pods[:3])}"
            )
            return
        ordered = replace(
            repair,
            state=RepairState.ACTING,
            acted_at=kept_time(now),
            tries=repair.tries + 1,
            message=f"ordered of {self._settings.provider}",
        )
        self._facts.statuses.pop(name, None)
        self._desk.write(name, replace(self._facts.record(name), repair=ordered))
        text = f"{repair.reason}. Repair action: {repair.action.value}."
        self._desk.record_event(name, "RepairOrdered", text)

    def _act(self, name: str, repair: RepairRecord, now: float) -> None:
        order_status = self._facts.statuses.get(name) or OrderStatus(Answer.WORKING)
        match order_status.answer:
            case Answer.FAILED:
                self._retry(name, repair, order_status.text, now)
            case Answer.UNSUPPORTED:
                self._leave_to_person(name, repair, order_status.text, now)
            case Answer.GONE:
                self._await_end(name, repair, order_status, now)
            case Answer.DONE:
                if repair.action is Action.REPLACE:
                    self._prove(name, repair)
                self._await_return(name, repair, order_status, now)
            case Answer.WORKING:
                limit = limit_seconds(repair.action, self._settings)
                # A repairer that has taken over asks first: the order may be done, and a new
                # machine be there.
                is_answered = name in self._facts.statuses
                if is_answered and now >= (repair.acted_at or now) + limit:
                    text = order_status.text or f"{self._settings.provider} has not ended it"
                    self.fail(name, f"{text}, for {limit:.0f} s", now)
                    return
                if order_status.text:
                    self._desk.set_message(name, order_status.text)
                order = order_of(name, repair)
                self._ask(replace(order, is_tested=bool(self._settings.check)), now)

    def _prove(self, name: str, repair: RepairRecord) -> None:
        """Taint the Node that is left of a machine of which nothing runs any more."""
        node = self._facts.nodes.get(name)
        if node is None or not node.is_silent or node.is_fenced:
            return
        if node.boot_id == repair.boot_id:
            self._desk.patch(node, PatchNode(name, is_out_of_service=True))

    def _await_end(
        self, name: str, repair: RepairRecord, order_status: OrderStatus, now: float
    ) -> None:
        """End the repair of a machine that is gone when its Node is gone or out of service."""
        node, limit = self._facts.nodes.get(name), limit_seconds(repair.action, self._settings)
        if node is None or node.is_fenced:
            self.end(name, RepairState.DONE, order_status.text or "the machine is gone", now)
        elif node.boot_id != repair.boot_id:
            self._await_return(name, repair, order_status, now)  # Another machine has its name.
        elif node.is_silent or now < (repair.acted_at or now) + limit:
            self._prove(name, repair)
            self._desk.set_message(name, "its machine is gone; its Node is to be silent or deleted")
        else:
            self.fail(name, f"its machine is gone, and its Node reports for {limit:.0f} s", now)

    def _ask(self, order: RepairOrder, now: float) -> None:
        identity, at = self._asked.get(order.node, ("", 0.0))
        if identity != order.id:
            self._desk.out.append(OrderRepair(order))
        elif at <= now:
            self._desk.out.append(AskProvider(order))
        else:
            return
        self._asked[order.node] = (order.id, math.inf)

    def _await_return(
        self, name: str, repair: RepairRecord, order_status: OrderStatus, now: float
    ) -> None:
        target = order_status.replacement or name
        node = self._facts.nodes.get(target)
        if node is None or not _is_back(node, name, repair):
            limit = limit_seconds(repair.action, self._settings)
            if now >= (repair.acted_at or now) + limit:
                self.fail(name, f"the node {target} has not come back for {limit:.0f} s", now)
            else:
                self._desk.set_message(
                    name, f"{self._settings.provider} is done; {target} is to be Ready"
                )
            return
        record = self._facts.record(name)
        if target != name:
            record = replace(record, repair=replace(repair, replacement=target))
            is_held = node.has_taint and node.health is Health.UNSCHEDULABLE
            if self._settings.check and not is_held:
                self._desk.patch(node, replace(held_back(target), repair_of=name))
        self.start_check(name, record, target, now)

    def _leave_to_person(self, name: str, repair: RepairRecord, text: str, now: float) -> None:
        """Leave the repair to a person: the provider cannot do it now, and is asked again later."""
        known = self._refused.get(name)
        times = known.times + 1 if known is not None and known.action is repair.action else 1
        until = now + refused_seconds(times, self._settings)
        self._refused[name] = Refusal(repair.action, times, until)
        waiting = replace(repair, state=RepairState.WAITING, acted_at=None, tries=0)
        record = replace(self._facts.record(name), repair=waiting)
        self._desk.write(name, with_message(record, f"{text[:400]}{BY_HAND}"))
        self._desk.warn_once(name, "RepairByHand", text)

    def _retry(self, name: str, repair: RepairRecord, text: str, now: float) -> None:
        """Handle a failure of the provider: try again after a back-off, or go one rung up."""
        if repair.tries >= self._settings.tries_max:
            self.fail(name, text, now)
            return
        self._facts.statuses.pop(name, None)
        waiting = replace(repair, state=RepairState.WAITING)
        record = replace(self._facts.record(name), repair=waiting)
        self._desk.write(
            name, with_message(record, f"try {repair.tries} failed: {text}; tried again soon")
        )

    # The node is back, and tested.

    def start_check(self, name: str, record: NodeRecordSpec, target: str, now: float) -> None:
        """Test the node that is back, if any test is configured."""
        assert record.repair is not None
        at = kept_time(now)
        check = f"{target}-{round(at * 1000):x}" if self._kinds(record.repair) else ""
        checking = replace(
            record.repair,
            state=RepairState.CHECKING,
            returned_at=at,
            check=check,
            message="is being tested" if check else "",
        )
        self._desk.write(name, replace(record, repair=checking))

    def _kinds(self, repair: RepairRecord) -> tuple[CheckKind, ...]:
        return self._settings.burn_in if repair.asked_by == APPEAL else self._settings.check

    def _check(self, name: str, repair: RepairRecord, now: float) -> None:
        target = repair.replacement or name
        node = self._facts.nodes.get(target)
        if node is None:
            self.fail(name, f"the node {target} went away while it was tested", now)
            return
        again = [fault for fault in node.faults if fault.at > (repair.returned_at or now)]
        if again:
            self.fail(name, f"{again[0].reason} again while it was tested", now)
            return
        check_seen = self._facts.checks.get(repair.check)
        if check_seen is None or check_seen.phase in (CheckPhase.PENDING, CheckPhase.RUNNING):
            self._await_check(name, repair, node, now)
        elif check_seen.phase is CheckPhase.FAILED and target in check_seen.faulty:
            self._fail_check(name, repair, target, check_seen.message, now)
        elif check_seen.phase is CheckPhase.UNKNOWN:
            self._finish(name, node, f"repaired; its check says nothing: {check_seen.message}", now)
        else:
            self._finish(name, node, "repaired, and its check passed", now)

    def _await_check(self, name: str, repair: RepairRecord, node: RepairNode, now: float) -> None:
        if not repair.check:
            self._finish(name, node, "repaired", now)
        elif now >= self._check_limit(repair):
            self._finish(name, node, "repaired; its check did not come to an end", now)
        elif repair.check not in self._made and repair.check not in self._facts.checks:
            self._made.add(repair.check)
            kinds, timeout = self._kinds(repair), int(self._settings.check_seconds)
            # Forced: pods that still run there were to move off.
            spec = NodeCheckSpec((node.name,), kinds, f"after: {repair.reason}", True, timeout)
            self._desk.out.append(MakeCheck(name, repair.check, spec))

    def _check_limit(self, repair: RepairRecord) -> float:
        check_seen, settings = self._facts.checks.get(repair.check), self._settings
        is_begun = check_seen is not None and check_seen.phase is not CheckPhase.PENDING
        since = repair.returned_at or repair.began_at
        return since + (settings.check_seconds if is_begun else settings.check_pending_seconds)

    def _fail_check(
        self, name: str, repair: RepairRecord, target: str, text: str, now: float
    ) -> None:
        entry = blame.of_check(kept_time(now), repair.check, text or "its check failed")
        self._desk.write(target, blame.add(self._facts.record(target), entry, now))
        if target != name:
            reason = f"it took the place of {name}, and failed its check"
            self._desk.quarantine(target, reason, now)
        self.fail(name, f"the check {repair.check} failed: {text}", now)

    def _finish(self, name: str, node: RepairNode, text: str, now: float) -> None:
        """Take the node back into service; or into quarantine, if it has a bad record."""
        record, desk = self._facts.record(name), self._desk
        repair = record.repair
        assert repair is not None
        after = ended(record, RepairState.DONE, text, self._settings, now)
        doubt = ""
        if repair.asked_by == APPEAL:
            after = freed(after)
        elif node.name != name:
            after = freed(after)  # its blame has gone with the machine
        elif desk.is_automatic(node):
            doubt = desk.suspicion(after, now)
            doubt = doubt if desk.may_quarantine(name, doubt) else ""
        is_other_boot = bool(node.boot_id) and node.boot_id != repair.boot_id
        unchanged = f"check {repair.check}" if repair.check else f"repair {repair.began_at:.3f}"
        is_kept = node.name == name and (after.quarantined_at is not None or bool(doubt))
        verified = node.boot_id if is_other_boot else unchanged
        desk.give_back(name, node, verified, is_kept=is_kept)
        self._forget_order(name)
        desk.write(name, after)
        desk.record_event(
            name, "NodeCleared" if repair.asked_by == APPEAL else "NodeRepaired", text
        )
        if doubt and after.quarantined_at is None:
            desk.quarantine(name, doubt, now)

    # The repair is over.

    def fail(self, name: str, text: str, now: float) -> None:
        """Handle a failed rung: the next rung follows, or a person."""
        repair = self._facts.record(name).repair
        assert repair is not None
        node = self._facts.nodes.get(name)
        self._disown(name, repair, now)
        self.end(name, RepairState.FAILED, text, now)
        self._desk.record_event(
            name, "RepairFailed", f"{repair.action.value}: {text}", is_warning=True
        )
        if repair.asked_by == APPEAL:
            self._desk.quarantine(name, f"its burn-in failed: {text}", now)
            return
        if repair.asked_by == PERSON or node is None or not self._desk.is_automatic(node):
            return
        above = rung_above(repair.action, self._settings.supports)
        if above is None or repair.replacement:
            self._desk.quarantine(name, f"{repair.action.value} failed: {text}", now)
            return
        # A node that was back is no longer lost: its failed test requires more.
        asked_by = repair.asked_by if repair.returned_at is None else "check"
        need = Need(above, repair.reason, asked_by, repair.fault)
        self._desk.write(name, begun(self._facts.record(name), need, above, now))

    def _disown(self, name: str, repair: RepairRecord, now: float) -> None:
        """Quarantine a late replacement that may yet join: it was not tested, and no repair will
        return it."""
        order_status = self._facts.statuses.get(name)
        late = order_status.replacement if order_status is not None else ""
        if late and repair.state is RepairState.ACTING and self._settings.check:
            reason = f"it was to take the place of {name}, and came too late to be tested"
            self._desk.quarantine(late, reason, now)

    def end(self, name: str, state: RepairState, text: str, now: float) -> None:
        """End the repair under way."""
        self._forget_order(name)
        self._desk.end(name, state, text, now)

    def _forget_order(self, name: str) -> None:
        self._refused.pop(name, None)
        self._facts.statuses.pop(name, None)
        self._asked.pop(name, None)


def _is_back(node: RepairNode, name: str, repair: RepairRecord) -> bool:
    """True if the node, or its replacement, is up after the order."""
    is_same_boot = node.name == name and node.boot_id == repair.boot_id
    is_as_before = is_same_boot and repair.action is not Action.RESET_GPU and repair.boot_id
    return node.is_ready and not is_as_before

"""Shared actions of the repairer's parts: write records, patch nodes, record events, quarantine.

A patch is given once per version of its node. A node taken back into service is not news until its
object shows it: otherwise an older view of it would count as a new fault.
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.core.nodes import blame
from unbroken.spec.keys import REPAIR
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import NodeRecovery

from .events import (
    PatchNode,
    RecordRepairEvent,
    RepairEffect,
    RepairNode,
    RepairSettings,
    WriteRecord,
)
from .facts import RepairFacts
from .records import ended, held_back, quarantined, returned, with_message
from .rules import PENDING, is_flapping, is_full


class RepairDesk:
    """Effects of one step, and orders about nodes that are not shown yet."""

    def __init__(self, settings: RepairSettings, facts: RepairFacts) -> None:
        self._settings = settings
        self._facts = facts
        self.out: list[RepairEffect] = []
        self._returned: dict[str, str] = {}
        """The value of `verified` from which on a node is news, by node."""
        self._patched: dict[str, tuple[RepairNode, PatchNode]] = {}
        self._orders: dict[str, str] = {}
        """The person's order that was accepted for each node, until the node is shown without
        it."""
        self._warned: set[tuple[str, str]] = set()
        self._held: set[str] = set()
        """Nodes that are not quarantined because too many are out of service."""

    def is_news(self, node: RepairNode) -> bool:
        """False while the node is still shown as it was before it was taken into service."""
        wanted = self._returned.get(node.name)
        if wanted is not None and node.verified != wanted:
            return False
        self._returned.pop(node.name, None)
        if self._orders.get(node.name) != node.order:
            self._orders.pop(node.name, None)
        return True

    def order_on(self, node: RepairNode) -> str:
        """Return the person's order on the node; empty: it was accepted already."""
        return "" if self._orders.get(node.name) == node.order else node.order

    def forget(self, name: str) -> None:
        """Forget the node: it is gone."""
        for kept in (self._returned, self._patched, self._orders):
            kept.pop(name, None)
        self._held.discard(name)

    def is_shown(self, node: RepairNode) -> bool:
        """True if the node has changed since it was patched last."""
        patched = self._patched.get(node.name)
        return patched is None or patched[0] != node

    def is_automatic(self, node: RepairNode) -> bool:
        """True if the node is repaired without a person."""
        return self._facts.recovery(node) is NodeRecovery.AUTOMATIC

    def write(self, name: str, record: NodeRecordSpec) -> None:
        """Write the record if it has changed."""
        if self._facts.record(name) != record:
            self._facts.records[name] = record
            self.out.append(WriteRecord(name, record))

    def set_message(self, name: str, text: str) -> None:
        """Write what the repair under way does or waits for."""
        self.write(name, with_message(self._facts.record(name), text))

    def end(self, name: str, state: RepairState, text: str, now: float) -> None:
        """End the repair under way."""
        self.write(name, ended(self._facts.record(name), state, text, self._settings, now))

    def patch(self, node: RepairNode, patch: PatchNode) -> None:
        """Patch a node, once per version of it."""
        if self._patched.get(node.name) == (node, patch):
            return
        self._patched[node.name] = (node, patch)
        if REPAIR in patch.annotations and node.order:
            self._orders[node.name] = node.order
        self.out.append(patch)

    def give_back(self, name: str, node: RepairNode, verified: str, *, is_kept: bool) -> None:
        """Take a node into service, or into quarantine (`is_kept`), after the repair of `name`."""
        self._returned[node.name] = verified
        self.out.append(replace(returned(node, verified, is_kept=is_kept), repair_of=name))

    def record_event(self, name: str, reason: str, text: str, *, is_warning: bool = False) -> None:
        """Record an event on the node."""
        self.out.append(RecordRepairEvent(name, reason, text, is_warning))

    def warn_once(self, name: str, reason: str, text: str) -> None:
        """Record a warning, once while this repairer lives."""
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            self.record_event(name, reason, text, is_warning=True)

    def suspicion(self, record: NodeRecordSpec, now: float) -> str:
        """Return why a node with the record must be quarantined; empty: it need not be."""
        points = blame.score(record, now, self._settings.blame_limit)
        if points >= self._settings.blame_limit:
            return f"{points:.1f} points are held against it, {record.blame[-1].text[:100]} last"
        if is_flapping(record, self._settings, now):
            hours = self._settings.flap_seconds / 3600
            return f"it was repaired {self._settings.flaps_max} times within {hours:.0f} hours"
        return ""

    def may_quarantine(self, name: str, reason: str) -> bool:
        """Return True if a node that works may be quarantined now.

        If it may not, an event says so once, and the node is in `admitted` when it may.
        """
        full = self._full(name)
        if not full:
            self._held.discard(name)
        elif reason and name not in self._held:
            self._held.add(name)
            text = f"{reason}; the node stays in service: {full}"
            self.record_event(name, "QuarantineHeldBack", text, is_warning=True)
        return not full

    def admitted(self) -> list[str]:
        """Return nodes whose quarantine was held back, and need not be any more; each once."""
        result = sorted(name for name in self._held if not self._full(name))
        self._held.difference_update(result)
        return result

    def _full(self, name: str) -> str:
        facts = self._facts
        return is_full(name, facts.out_of_service(), len(facts.nodes), self._settings)

    def quarantine(self, name: str, reason: str, now: float) -> None:
        """Keep new pods off a node until a person has cleared it.

        The limit of nodes out of service is not checked here: a node that was being repaired, or
        has failed its check, must not come back.
        """
        if self._settings.is_dry_run:
            self.warn_once(name, "RepairDryRun", f"would quarantine the node: {reason}")
            return
        self.write(name, quarantined(self._facts.record(name), reason, now))
        text = f"{reason}; it stays out until: unbroken nodes clear {name} --why TEXT"
        self.record_event(name, "NodeQuarantined", text, is_warning=True)
        node = self._facts.nodes.get(name)
        if node is not None and node.health not in PENDING:
            self.patch(node, held_back(name))

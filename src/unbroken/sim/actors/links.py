"""Links between an operator and an agent: messages are lost, doubled, late and out of order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from unbroken.core.agent.link_order import LinkOrder
from unbroken.core.job.events import PodUid
from unbroken.sim.schedule import Schedule
from unbroken.wire.agent import HEARTBEAT_SECONDS, AgentReport, Command, Request
from unbroken.wire.observation import Evidence

POLL_SECONDS = 0.15
"""Seconds from a command to the status request, for an agent without a link."""


class Way(Enum):
    """Direction in which messages pass between an operator and an agent."""

    BOTH = "both"
    UP = "up"
    """Only messages of the agent."""
    DOWN = "down"
    """Only messages of the operator."""
    NONE = "none"


@dataclass(slots=True)
class Quality:
    """Quality of the network between operators and agents; `heal` makes it perfect."""

    loss: float = 0.0
    double: float = 0.0
    late: float = 0.0
    late_seconds: float = 3.0
    usual_seconds: float = 0.01
    is_beating: bool = False
    """Heartbeats continue until nothing is under way, because late messages may be outdated."""
    is_polled: bool = False
    """Requests and answers alternate, as `agent_http` does.

    A command waits for the answer that is under way, and only the newest is sent. A message under
    way is lost with its sender.
    """
    outlives_cuts: bool = False
    """Messages that are under way to an agent when the way is cut still arrive: they were past the
    cut, or wait in the agent's socket."""

    def heal(self) -> None:
        """Every message arrives once, in order."""
        self.loss = self.double = self.late = 0.0


class Reporter(Protocol):
    """An agent, as its links see it."""

    is_alive: bool
    quality: Quality
    links: list[Link]
    order: LinkOrder

    def report(self) -> AgentReport:
        """Return the agent's present state."""

    def command(self, command: Command) -> None:
        """Obey."""

    def ask(self, request: Request, answer: Callable[[Evidence], None]) -> None:
        """Follow a request; one for evidence is answered."""

    def renew(self, asked_at: float) -> None:
        """Take the operator's answer to a beat."""


class Link:
    """One connection.

    Commands under way arrive even if the operator is gone, and count as long as no newer link is
    open. Reports under way are lost with the connection.
    """

    def __init__(
        self,
        schedule: Schedule,
        pod: PodUid,
        agent: Reporter,
        told: Callable[[PodUid, AgentReport], None],
        shown: Callable[[PodUid, Evidence], None] = lambda pod, evidence: None,
    ) -> None:
        self._schedule = schedule
        self.pod = pod
        self.agent = agent
        self._told = told
        self._shown = shown
        self._number = agent.order.ask()
        agent.order.open(self._number)
        self.is_open = True
        self.way = Way.BOTH
        """Direction in which messages pass, while no side has noticed a cut."""
        self.received_at = schedule.now
        """Time of the agent's last message to the operator."""
        self._has_reported = False
        self._repeats = False
        self._trails = False
        self._answers = self._orders = 0
        """Number of answers under way, if the agent is polled."""
        self._next: Command | None = None
        """Goes out when nothing is."""
        self._astray_until = 0.0
        """Latest time at which the newest late or repeated message arrives."""

    def _comes_up(self) -> bool:
        """Return whether the agent's messages arrive."""
        return self.way in (Way.BOTH, Way.UP)

    def _comes_down(self, *, is_new: bool = False) -> bool:
        """Return whether the agent receives messages. `is_new`: the message is sent now."""
        is_through = self.way in (Way.BOTH, Way.DOWN)
        return is_through or (self.agent.quality.outlives_cuts and not is_new)

    def up(self) -> None:
        """Report the agent's state to the operator."""
        if self._orders:
            return  # it is asked once the order has come
        self._answers += self.agent.quality.is_polled and self._comes_up()
        is_clean = self._send_up(self._arrived_up, self.agent.report())
        if not is_clean and not self._repeats:
            self._repeats = True
            self._schedule.after(HEARTBEAT_SECONDS, self._heartbeat)
        quality = self.agent.quality
        if not is_clean and quality.is_beating:
            self._astray_until = self._schedule.now + quality.late_seconds
            self._trail_later()

    def beat(self, at: float) -> None:
        """Send the operator the time on the agent's clock, which it sends back."""
        self._send_up(self._arrived_beat, at)

    def _arrived_beat(self, at: float) -> None:
        if self.is_open and self._comes_up():
            self.received_at = self._schedule.now
            if self._has_reported:
                self._send_down(self._arrived_renewal, at)

    def _arrived_renewal(self, at: float) -> None:
        if self.agent.is_alive and self._comes_down():
            self.agent.renew(at)

    def resume(self) -> None:
        """Let messages pass again; lost ones stay lost, and the next heartbeat shows the state."""
        if self.way is not Way.BOTH:
            self.way = Way.BOTH
            self._schedule.after(HEARTBEAT_SECONDS, self._heartbeat)

    def down(self, command: Command) -> None:
        """Send the agent the wanted state."""
        if self._answers or self._orders:
            self._next = command
            return
        self._next = None  # only the newest is sent
        self._orders += self.agent.quality.is_polled and self._comes_down(is_new=True)
        self._send_down(self._arrived_down, command)

    def ask(self, request: Request) -> None:
        """Ask once; request and answer may be lost, late and doubled."""
        self._send_down(self._arrived_request, request)

    def _arrived_request(self, request: Request) -> None:
        if self.agent.is_alive and self._comes_down():
            self.agent.ask(request, self._answer)

    def _answer(self, evidence: Evidence) -> None:
        self._send_up(self._arrived_answer, evidence)

    def _arrived_answer(self, evidence: Evidence) -> None:
        if self.is_open and self._comes_up():
            self._shown(self.pod, evidence)

    def _send_up(self, arrive: Callable[..., None], message: object) -> bool:
        return self._send(arrive, message, self._comes_up())

    def _send_down(self, arrive: Callable[..., None], message: object) -> bool:
        return self._send(arrive, message, self._comes_down(is_new=True))

    def _send(self, arrive: Callable[..., None], message: object, is_through: bool) -> bool:
        """Send a message; return whether it arrives once and in order."""
        schedule, quality = self._schedule, self.agent.quality
        if not is_through or (quality.loss and schedule.chance(quality.loss)):
            schedule.trace("link", f"{self.pod} loses {type(message).__name__}")
            return False
        is_late = bool(quality.late) and schedule.chance(quality.late)
        seconds = schedule.between(0.0, quality.late_seconds) if is_late else quality.usual_seconds
        schedule.after(seconds, arrive, message)
        if quality.double and schedule.chance(quality.double):
            schedule.after(schedule.between(0.0, quality.late_seconds), arrive, message)
            return False
        return not is_late

    def _trail_later(self) -> None:
        """Send a heartbeat once no message is late any more; otherwise an old report would be the
        last one.

        A real agent's heartbeats never end; the one after the last late message represents them.
        """
        if not self._trails:
            self._trails = True
            seconds = HEARTBEAT_SECONDS + self._astray_until - self._schedule.now
            self._schedule.after(seconds, self._trail)

    def _trail(self) -> None:
        self._trails = False
        if self._schedule.now <= self._astray_until:
            self._trail_later()  # another message went astray meanwhile
        else:
            self._heartbeat()

    def _heartbeat(self) -> None:
        """Heartbeats matter where a message went astray; elsewhere they repeat what is known."""
        self._repeats = False
        if self.is_open and self.agent.is_alive:
            self.up()

    def _arrived_up(self, report: AgentReport) -> None:
        if self.is_open and self._comes_up():
            self.received_at, self._has_reported = self._schedule.now, True
            self._told(self.pod, report)
        self._answers = max(0, self._answers - 1)
        if self._next is not None and not self._answers:
            command, self._next = self._next, None
            self.down(command)

    def _arrived_down(self, command: Command) -> None:
        self._orders = 0
        is_lost = not self._comes_down() or (self.agent.quality.is_polled and not self.is_open)
        if not (self.agent.quality.is_polled or self.agent.order.may_command(self._number)):
            self._schedule.trace("link", f"{self.pod} refuses {command} of an older link")
            is_lost = True
        if self.agent.is_alive and not is_lost:
            self.agent.command(command)
            if self.agent.quality.is_polled and self.is_open:
                self._schedule.after(POLL_SECONDS, self._heartbeat)

"""The lease on an agent's workers: how long they may run while nobody can tell them to stop.

A node that is cut off cannot be asked whether its workers still run. So they end by themselves when
their lease has run out, and the operator can take them for ended after that time
(`core.job.leases`). The lease is renewed by the operator, or by all peers of the attempt together:

- The agent tells the operator the time on its own clock. The operator sends that time back, and the
  lease counts from it. A renewal that is late on its way is worth less, and never too much.
- Without an operator the agents of the attempt vouch for each other. An agent that was stopped
  vouches no more, so one peer that the operator can stop is enough to let the lease run out. As
  long as nobody is stopped, an operator that is away stops nothing.

Times are seconds on the agent's clock, which must count the time for which the machine was
suspended.
"""

from __future__ import annotations

import math

from unbroken.wire.agent import StartCommand

from .events import HoldLease, LeaseEvent, Renewed, Vouched
from .run import Run


class Lease:
    """The lease on the workers of the newest attempt that an agent has started."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length; 0: the workers need no lease."""
        self.is_over = False
        """The workers were ended because it ran out."""
        self.unvouched: int | None = None
        """The newest attempt, while this agent has not vouched for it to a peer."""
        self._attempt = -1
        self._operator_at = self._peers_at = -math.inf
        """The newest time at which the agent was certainly still wanted."""
        self._held_until: float | None = None
        """What the keeper was told: None where no worker may live."""

    def begin(self, attempt: int, seconds: float) -> None:
        """Start the workers of an attempt under a lease of this length."""
        self._attempt, self.seconds, self.is_over = attempt, seconds, False
        self.unvouched = attempt
        self._peers_at = -math.inf

    def take(self, event: LeaseEvent) -> None:
        """Renew it."""
        match event:
            case Renewed(at):
                self._operator_at = max(self._operator_at, at)
            case Vouched(attempt, at) if attempt == self._attempt:
                self._peers_at = max(self._peers_at, at)
            case Vouched():
                pass  # Of an attempt that this agent has left.

    def vouch(self, *, vouches: bool) -> bool:
        """Note whether a peer is told that it may go on, and return it."""
        if vouches:
            self.unvouched = None
        return vouches

    def may_start(self, command: StartCommand, now: float) -> bool:
        """Tell whether workers may start: a start that was long on its way must not begin what the
        operator takes for ended."""
        return not command.lease_seconds or now < self._operator_at + command.lease_seconds

    def due(self) -> float | None:
        """Return when the workers are to be ended; None: never, or it is done."""
        return None if self.is_over else self._held_until

    def hold(self, run: Run | None, *, has_leftovers: bool) -> list[HoldLease]:
        """Tell the keeper how long workers may live, if that has changed. `has_leftovers`: what
        workers have left behind was not seen to end."""
        until = self._until(run, has_leftovers=has_leftovers)
        if until == self._held_until:
            return []
        self._held_until = until
        return [HoldLease(until)]

    def _until(self, run: Run | None, *, has_leftovers: bool) -> float | None:
        """When the workers must have ended; None: none may live, or they need no lease."""
        if run is None or run.is_rankless or not self.seconds:
            return None
        if run.workers and not has_leftovers and not run.is_alive():
            return None
        return max(self._operator_at, self._peers_at) + self.seconds

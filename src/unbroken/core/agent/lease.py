"""The lease on an agent's workers: the time that they may run while no operator can stop them.

A node that is cut off cannot be asked whether its workers still run. So the workers end by
themselves when their lease has run out, and the operator takes them as ended after that time
(`core.job.leases`). The lease is renewed by the operator, or by all peers of the attempt together:

- The agent sends the operator the time on its own clock. The operator sends that time back, and the
  lease counts from it. A delayed renewal is worth less, and never too much.
- Without an operator the agents of the attempt vouch for each other (`peers`). A stopped agent
  vouches no more, so the operator needs to stop only one peer to let the lease run out. As long as
  no agent is stopped, an absent operator stops nothing.

Times are seconds on the agent's clock, which must count the time for which the machine was
suspended.
"""

from __future__ import annotations

import math

from unbroken.wire.agent import StartCommand

from .events import HoldLease, LeaseEvent, Renewed, Vouched
from .run import Run

URGENT_SHARE = 0.4
"""Share of a lease at whose end it is urgent. The operator needs less than the rest to notice that
an agent is silent, and to stop the other ranks."""


class Lease:
    """The lease on the workers of the newest attempt that an agent has started."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length in seconds; 0: the workers need no lease."""
        self.is_over = False
        """The workers were ended because the lease ran out."""
        self.unvouched: int | None = None
        """The newest attempt, as long as this agent has not vouched for it to a peer."""
        self._attempt = -1
        self._operator_at = self._peers_at = -math.inf
        """The newest time at which the operator certainly still wanted the agent to run."""
        self._held_until: float | None = None
        """Deadline that the keeper has received; None: no worker may be alive."""

    def begin(self, attempt: int, seconds: float) -> None:
        """Start the workers of an attempt under a lease of this length."""
        self._attempt, self.seconds, self.is_over = attempt, seconds, False
        self.unvouched = attempt
        self._peers_at = -math.inf

    def take(self, event: LeaseEvent) -> None:
        """Renew the lease."""
        match event:
            case Renewed(at):
                self._operator_at = max(self._operator_at, at)
            case Vouched(attempt, at) if attempt == self._attempt:
                self._peers_at = max(self._peers_at, at)
            case Vouched():
                pass  # The renewal is for an attempt that this agent has left.

    def vouch(self, *, vouches: bool) -> bool:
        """Record whether the agent vouches for the attempt to a peer, and return it."""
        if vouches:
            self.unvouched = None
        return vouches

    def may_start(self, command: StartCommand, now: float) -> bool:
        """Return whether workers may start. A start order that was long under way must not start
        workers that the operator takes as ended."""
        return not command.lease_seconds or now < self._operator_at + command.lease_seconds

    def due(self) -> float | None:
        """Return when the workers are to be ended; None: never, or they have been."""
        return None if self.is_over else self._held_until

    def is_urgent(self, now: float) -> bool:
        """Return whether the workers must end soon."""
        due = self.due()
        return due is not None and now >= due - URGENT_SHARE * self.seconds

    def hold(self, run: Run | None, *, has_leftovers: bool) -> list[HoldLease]:
        """Send the keeper the new deadline for workers, if it has changed. `has_leftovers`:
        processes left by workers were not seen to end."""
        until = self._until(run, has_leftovers=has_leftovers)
        if until == self._held_until:
            return []
        self._held_until = until
        return [HoldLease(until)]

    def _until(self, run: Run | None, *, has_leftovers: bool) -> float | None:
        """Return when the workers must have ended; None: none may be alive, or they need no
        lease."""
        if run is None or run.is_rankless or not self.seconds:
            return None
        if run.workers and not has_leftovers and not run.is_alive():
            return None
        return max(self._operator_at, self._peers_at) + self.seconds

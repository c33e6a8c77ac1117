"""The agent's end of parked workers: which rank each may become, and what it imports for that.

The template leaves out modules that read a variable of one rank while they are imported, and those
whose library starts threads then. A parked worker may import them, because it is forked no more: it
is told the variables of the rank that it will probably become. If the rank that starts has other
values, another parked worker takes it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.log_lines import Log
from unbroken.wire.warm import LATER, MESSAGE_BYTES_MAX, PER_ATTEMPT, PER_RANK

from .environment import Program

log = Log(__name__)

TRIALS_MAX = 8
"""Parked workers that may end because a module is unfit for them; then no other one imports."""
_NAMES = tuple(name for name in PER_RANK if name not in PER_ATTEMPT)


@dataclass(slots=True, eq=False)
class Parked:
    """A worker that waits, or that the template is about to park."""

    pair: socket.socket
    pid: int = 0
    rank: Mapping[str, str] | None = None
    """Variables of the rank that it imports for; None: it may become any rank."""
    is_prepared: bool = False
    """True if it has imported for its rank."""

    def suits(self, program: Program) -> bool:
        """Return whether its imports allow it to become the program."""
        return self.rank is None or (self.is_prepared and self.rank == rank_of(program))

    def is_importing(self) -> bool:
        """Return whether it is importing for its rank."""
        return self.rank is not None and not self.is_prepared


@dataclass(slots=True)
class Ranks:
    """Ranks of this node, and what parked workers import for them."""

    programs: dict[int, Program] = field(default_factory=dict)
    """Newest program of each local rank."""
    later: int = 0
    """Modules that the template leaves to parked workers."""
    imported: int = 0
    """Most modules that a parked worker has imported for its rank."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Reasons, by module that no parked worker must import either."""
    trials: int = 0
    """Parked workers that have ended because a module was unfit for them."""

    def left_out(self, template: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons by module that every start imports, of those that the template leaves
        out."""
        if not self.imported:
            return dict(template)
        rest = {name: why for name, why in template.items() if not why.endswith(LATER)}
        return {**rest, **self.unfit}

    def may_try(self) -> bool:
        """Return whether parked workers import for their ranks."""
        return self.trials < TRIALS_MAX

    def prepare_next(self, parked: Sequence[Parked]) -> Parked | None:
        """Have one of the workers import for a rank that none has imported for, unless one does so
        now: they must not take all processors from the training. Return it."""
        taken = [each.rank for each in parked if each.rank is not None]
        ranks = [rank for rank in map(rank_of, self.programs.values()) if rank not in taken]
        free = [each for each in parked if each.pid and each.rank is None]
        may_try = self.later and self.may_try()
        if not (may_try and ranks and free) or any(each.is_importing() for each in parked):
            return None
        order = {"type": "prepare", "environment": ranks[0], "left_out": self.unfit}
        try:
            free[0].pair.send(json.dumps(order).encode())
        except OSError:
            return None  # It has ended, and will be reaped.
        free[0].rank = ranks[0]
        return free[0]

    def take_answer(self, parked: Parked) -> bool:
        """Read the answer of a worker that imports for its rank; return False if there is none
        yet."""
        try:
            data = parked.pair.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        answer = json.loads(data or "null")
        if answer is None:
            self.trials = TRIALS_MAX
            log.warning("a parked worker ended while it imported for its rank", pid=parked.pid)
        elif answer["left_out"]:
            self.trials += 1
            self.unfit.update(answer["left_out"])
            log.info("parked workers leave out modules", count=len(answer["left_out"]))
        else:
            parked.is_prepared, self.imported = True, max(self.imported, answer["modules"])
            log.info("parked worker has imported for its rank", count=answer["modules"])
        return True

    def unsuitable(self, parked: Sequence[Parked]) -> list[Parked]:
        """Return the workers that are of no use for the newest programs, or not yet."""
        ranks = [rank_of(program) for program in self.programs.values()]
        own = [each for each in parked if each.rank is not None]
        return [each for each in own if not each.is_prepared or each.rank not in ranks]


def rank_of(program: Program) -> dict[str, str]:
    """Return the variables of a program's rank that no new attempt changes by itself."""
    variables = program.environment
    return {name: variables[name] for name in _NAMES if name in variables}

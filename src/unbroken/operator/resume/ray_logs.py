"""Reads the logs of Ray's jobs by their log rules, through the dashboards of their heads.

A dashboard sends all that a job has written, and then what it writes, about every 2 s. It and the
patterns are a user's, so messages and lines are bounded, and the budget of the dashboard is charged
for each message, pings included: a log is read late rather than others not at all.

- A rule counts as broken only while nothing more can be read: the log is judged as a whole.  A new
  operator reads it from its start, and so knows first matches and rules that stopped.
- Time in which a log cannot be read does not count: a silent dashboard says nothing of a job.
- A process that was paused reads what came meanwhile before it acts on a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Generic, TypeVar

import aiohttp

from unbroken.budget import Budget
from unbroken.core.job.obstacles import printable
from unbroken.core.logs.lines import LineAssembler
from unbroken.core.logs.patterns import PatternSet
from unbroken.core.logs.rule_config import CompiledRule, compile_rule
from unbroken.core.logs.rule_events import (
    Lines,
    LogRuleEffect,
    LogRuleEvent,
    LogStarted,
    Paused,
    RuleViolated,
    Unfinished,
)
from unbroken.core.logs.rules import LogRules, patterns_of
from unbroken.core.ray_resume import Head
from unbroken.core.tick import Tick
from unbroken.errors import PeerError
from unbroken.kube.backoff import Backoff
from unbroken.kube.clock import entropy, monotonic, pause
from unbroken.log_lines import Log
from unbroken.spec.job.types import LogRule
from unbroken.spec.problems import Report
from unbroken.wire.agent import Violation

from .ray_dashboard import NO_ANSWER, ConnectionUse, Dashboard, DashboardAddress

log = Log(__name__)

QUIET_SECONDS = 0.5
"""Seconds without a message after which a log counts as read to its end.  Ray looks for new lines
every 2 s (1 s in `file_tail_iterator`, and `JobManager.LOG_TAIL_SLEEP_S`)."""
LATE_SECONDS = 5.0
"""Seconds that a line may come late: a rule is broken only so long after its deadline."""
AGAIN = Backoff(first=5.0, limit=300.0)
"""Seconds until a log that broke off or could not be opened is opened again: it is sent from its
start."""
PIECE_CHARACTERS = 1024
"""Characters that are read before other work gets its turn.  With the slowest patterns, such a
piece that ends the longest line takes 40 ms."""
PATTERNS_MEMORY_BYTES = 4 << 20
"""RE2's memory for all patterns of a RayCluster or RayJob, and for what it learns of them."""
LINE_BYTES_MAX = 4 * 1024
ERROR_CHARACTERS = 200
SHOWN_CHARACTERS = 160
"""Characters of a line, or of a rule's finding, that are shown."""

S = TypeVar("S", bound=Hashable)


class RayLogs(Generic[S]):
    """Keeps how the jobs of a subject break its log rules; calls `changed` when that changes."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        changed: Callable[[S], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`clock` is the monotonic clock of the running loop's timers."""
        self._dashboard = Dashboard(session)
        self._changed, self._clock = changed, clock
        self._followed: dict[S, _Followed] = {}
        self._new: asyncio.Queue[JobLog] = asyncio.Queue()

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = await self._new.get()
                found.task = tasks.create_task(found.follow())

    def want(
        self,
        subject: S,
        head: Head,
        place: DashboardAddress,
        ids: Iterable[str],
        rules: tuple[LogRule, ...],
        budget: Budget,
    ) -> Mapping[str, str]:
        """Read the logs of these jobs of a head from now on, and of no others of the subject; say
        how jobs break rules, by their ids."""
        found = self._followed.get(subject)
        if found is None or (found.head, found.place, found.rules) != (head, place, rules):
            self.forget(subject)
            found = self._followed[subject] = _Followed(head, place, rules)
        wanted = set(ids)
        for id in found.logs.keys() - wanted:
            found.logs.pop(id).leave()
        for id in wanted - found.logs.keys():
            judge = RayLogJudge(found.compiled, found.patterns)
            changed = partial(self._changed, subject)
            made = JobLog(self._dashboard, place, id, judge, budget, changed, self._clock)
            found.logs[id] = made
            self._new.put_nowait(made)
        return {id: one.broken for id, one in found.logs.items() if one.broken}

    def forget(self, subject: S) -> None:
        """Read no log of a subject any more."""
        found = self._followed.pop(subject, None)
        for one in found.logs.values() if found is not None else ():
            one.leave()


class _Followed:
    """The logs of one subject that are read, by the jobs' ids."""

    def __init__(self, head: Head, place: DashboardAddress, rules: tuple[LogRule, ...]) -> None:
        self.head, self.place, self.rules = head, place, rules
        made = (compile_rule(rule, "", Report()) for rule in rules)
        self.compiled = tuple(rule for rule in made if rule is not None)
        self.patterns = patterns_of(self.compiled, PATTERNS_MEMORY_BYTES)
        self.logs: dict[str, JobLog] = {}


class JobLog:
    """The log of one job of Ray, read by the rules."""

    def __init__(
        self,
        dashboard: Dashboard,
        place: DashboardAddress,
        id: str,
        judge: RayLogJudge,
        budget: Budget,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._dashboard, self._place, self._id = dashboard, place, id
        self._changed, self._clock = changed, clock
        self._judge, self._budget = judge, budget
        self._taken = 0
        """Characters of the log that were read."""
        self.broken = ""
        """The rule that the job breaks, in words; empty if it breaks none."""
        self._why = ""
        """Why the log was not read, as last logged."""
        self.task: asyncio.Task[None] | None = None
        self._is_left = False

    def leave(self) -> None:
        """Read no more."""
        self._is_left = True
        if self.task is not None:
            self.task.cancel()

    async def follow(self) -> None:
        """Read the log until cancelled, again from where it broke off."""
        failures, random = 0, entropy()
        while not self._is_left:
            before = self._taken
            try:
                with self._budget.connection(ConnectionUse.LOG):
                    async with self._dashboard.open_log(
                        self._place, self._id, self._charge
                    ) as socket:
                        self._judge.resumed(self._clock())
                        await self._read(socket)
            except PeerError as error:
                self._refused(str(error))
            except NO_ANSWER as error:
                log.debug("log of a job not read", url=self._place.url, job=self._id, error=error)
            except Exception:
                # A bug with one log must not stop the reading of all others.
                log.exception("log of a job not read", url=self._place.url, job=self._id)
            self._judge.paused(self._clock())
            failures = 1 if self._taken > before else failures + 1
            await pause(AGAIN.delay(failures, random))

    def _refused(self, why: str) -> None:
        """Log once why a log is not read."""
        if why != self._why and self._budget.may_log(self._clock()):
            self._why = why
            log.warning("log of a job not read", url=self._place.url, job=self._id, error=why)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read until the connection ends."""
        skip = self._taken
        wait: float | None = QUIET_SECONDS
        while True:
            began = self._clock()
            try:
                async with asyncio.timeout(wait):
                    message = await socket.receive()
            except TimeoutError:
                now = self._clock()
                if now > began + (wait or 0.0) + QUIET_SECONDS:
                    wait = QUIET_SECONDS  # this process stood still: first read what has come
                    continue
                wait = self._judged(now)
                continue
            if message.type is aiohttp.WSMsgType.PING:
                await socket.pong(message.data)
                await self._rest(len(message.data), 0.0)
            elif message.type is aiohttp.WSMsgType.PONG:
                await self._rest(len(message.data), 0.0)
            elif message.type is aiohttp.WSMsgType.TEXT:
                fresh = message.data[skip:]
                skip = max(skip - len(message.data), 0)
                self._taken += len(fresh)
                await self._take(fresh)
            elif message.type is aiohttp.WSMsgType.ERROR:
                raise PeerError(
                    f"its sender breaks the protocol: {message.data}"[:ERROR_CHARACTERS]
                )
            else:
                return
            wait = QUIET_SECONDS

    async def _take(self, text: str) -> None:
        """Take a message.  Even one without text, or whose text was read before, is charged."""
        for start in range(0, max(len(text), 1), PIECE_CHARACTERS):
            began = self._clock()
            piece = text[start : start + PIECE_CHARACTERS]
            self._judge.read(piece, began)
            await self._rest(len(piece), self._clock() - began, 0 if start else 1)

    def _charge(self, work: float) -> float:
        """Charge the reading of a piece of the stream; return the seconds until the next."""
        return self._budget.spend(0, work, self._clock(), messages=0)

    async def _rest(self, size: int, work: float, messages: int = 1) -> None:
        """Charge what was read, and give way until more may be read."""
        await pause(self._budget.spend(size, work, self._clock(), messages))

    def _judged(self, now: float) -> float | None:
        """Judge the log, which was read to its end; return the seconds until the next time."""
        broken = self._judge.broken(now)
        if broken != self.broken:
            self.broken = broken
            self._changed()
        deadline = self._judge.deadline()
        return None if deadline is None else max(deadline - now, QUIET_SECONDS)


class RayLogJudge:
    """The rules of a job, and which of them its log breaks.  Times are of one monotonic clock."""

    def __init__(self, rules: tuple[CompiledRule, ...], patterns: PatternSet | None = None) -> None:
        self._rules = LogRules(rules, [0], patterns=patterns)
        self._limits = {rule.spec.name: rule.spec for rule in rules}
        self._lines = LineAssembler(LINE_BYTES_MAX)
        self._at = 0.0
        """When the log was last read."""
        self._last = b""
        """The newest line."""
        self._broken: dict[tuple[str, Violation], RuleViolated] = {}

    def resumed(self, now: float) -> None:
        """The log can be read from now on."""
        self._step(LogStarted(), now)

    def paused(self, now: float) -> None:
        """The log cannot be read."""
        self._step(Paused(), now)

    def read(self, text: str, now: float) -> None:
        """Take in more of the log."""
        lines, self._at = self._lines.feed(text.encode(errors="replace")), now
        if lines:
            self._last = lines[-1]
            self._step(Lines(0, "stdout", lines), now)

    def broken(self, now: float) -> str:
        """Say how the log, read to its end, breaks a rule; empty: it breaks none."""
        for unfinished in self._lines.unfinished():
            self._step(Unfinished(0, unfinished, self._at), now)
        self._step(Tick(), now - LATE_SECONDS)
        worst = min(self._broken.values(), key=lambda one: (one.at, one.rule), default=None)
        return "" if worst is None else self._words(worst)

    def deadline(self) -> float | None:
        """Return when to judge again though nothing has come."""
        found = self._rules.deadline()
        return None if found is None else found + LATE_SECONDS

    def _step(self, event: LogRuleEvent, now: float) -> None:
        for effect in self._rules.step(event, now):
            self._note(effect)

    def _note(self, effect: LogRuleEffect) -> None:
        if isinstance(effect, RuleViolated):
            self._broken[effect.rule, effect.kind] = effect
        else:
            self._broken.pop((effect.rule, effect.kind), None)

    def _words(self, found: RuleViolated) -> str:
        name = printable(found.rule, SHOWN_CHARACTERS)
        if found.kind is not Violation.HANG:
            why = found.why.removeprefix("rank 0: ").removeprefix("rank 0 ")
            return f"breaks log rule {name}: {printable(why, SHOWN_CHARACTERS)}"
        rule = self._limits[found.rule]
        limit = rule.expected_recurring_frequency_in_seconds
        since = ""
        if found.rank is None:
            limit, since = rule.expected_start_cut_off_in_seconds, " since its start"
        line = printable(self._last.decode(errors="replace"), SHOWN_CHARACTERS)
        last = f"last line: {line}" if line else "no line at all"
        return f"is hung: no match of log rule {name} for {limit or 0.0:g} s{since}; {last}"

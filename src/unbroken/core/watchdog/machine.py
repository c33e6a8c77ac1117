"""Watches the ranks of one agent, for one attempt: what they show, and what each detector finds.

The machine asks for looks at its own deadlines (`Sample`), learns how long each rank is usually
silent in each phase, and raises and clears alarms in its views.  It stops nothing.

- There is no alarm by silence before enough was seen.  Nor is there one in the start-up, in the
  first steps, or in the first visit of a phase.
- Silence is judged only when /proc was read: `Sampled` ends each look that asks for it.
- A caller that comes later than the deadline was paused, perhaps with the whole machine. That time
  counts for no rank.

`RankState` is one rank: what it has shown, and what each detector makes of it. Signs of life are
taken from the best source that the rank gives: steps, else output, else work of its processors. A
weaker source is then no sign, but makes idleness into work (`rhythm.Limits`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from unbroken.core.patience import (
    BY_SIGN,
    ENDING,
    LATE_SPIN_SECONDS,
    LOOK_SECONDS,
    NEW_PHASE,
    START,
    START_GAPS,
    STEP_FLOOR_SECONDS,
    WARM_UP_CALLS,
    Allowed,
    SignSource,
)
from unbroken.core.tick import Tick
from unbroken.spec.job.detectors import Detector, Mode
from unbroken.wire.observation import Alarm, Bound, RankWatch
from unbroken.wire.worker import Page

from .events import (
    Continued,
    Ended,
    Halted,
    PageRead,
    RankStarted,
    Sample,
    Sampled,
    Taught,
    WatchdogEffect,
    WatchdogEvent,
    Wrote,
    early,
)
from .levels import (
    STARTUP,
    TRAIN,
    Checkpoints,
    Excuse,
    Finiteness,
    Pace,
    PhaseRhythm,
    SilenceVerdict,
)
from .rhythm import Patience, Rhythm, by_output, by_steps

FIRST_STEP = "first step"
PHASES_MAX = 16
"""Later ones share a place."""
PROCESS_SECONDS = 5.0
"""Seconds between looks at /proc while all is well."""
STOPPED_SECONDS, STUCK_SECONDS = 1.0, 10.0
TRACED_SECONDS = 20.0
"""Seconds that a debugger may stop it: a look at the stacks of a large process takes seconds on
a busy machine."""
SAME_SECONDS = 0.05
"""Times of a page that are translated from another clock differ by less from look to look."""
SAMPLE_SECONDS_MIN = 0.5
"""A share of the processor over less is noise."""
WORK_SHARE, WORK_BYTES = 0.1, 64 * 1024.0
"""Cores, bytes a second: more is work.  Threads of libraries in a process that hangs stay below."""
SPIN_SHARE, SPIN_CHANGE, SPIN_BYTES = 0.7, 0.3, 1024.0
"""Whole cores, steadily, with nothing read or written: how NCCL waits."""
SLOW_PHASE_SECONDS = 60.0
"""Seconds without news of the slow phase, after which a phase that is not slow ends the alarm."""
SILENCES = (Detector.SILENT, Detector.SPINNING)
_START, _NEW_PHASE = START.allowed(), NEW_PHASE.allowed()


class RankState:
    """One worker from its start to its end.  Times are of the driver's clock."""

    def __init__(
        self,
        rank: int,
        now: float,
        modes: Collection[Detector],
        floor: float,
        taught: Taught,
    ) -> None:
        self.rank = rank
        self._modes = modes
        self._floor_seconds = floor
        self.turns = 0
        self.hits = 0
        self.look_at = now + LOOK_SECONDS
        """Time to read page, output and perhaps /proc."""
        self._process_at = now
        self.is_ending = False
        """Another rank has ended."""
        self._page = Page()
        self._taught = taught
        self._phases = {key: PhaseRhythm(key, old.taken()) for key, old in taught.phases.items()}
        self._output, self._work = taught.output.taken(), Rhythm()
        self._began_at = now
        self._start_seconds: dict[SignSource, float] = {}
        """Seconds until each source of signs was in its rhythm."""
        self._writes = 0
        """Looks with output."""
        self._sign_at = self._wrote_at = self._work_at = self._calm_at = now
        """Last step or change of phase, output, work, and activity that is no spinning. A time in
        which the agent was paused is added to each of them."""
        self._has_written = self._has_worked = False
        self._step_excuse, self._output_excuse, self._save_excuse = Excuse(), Excuse(), Excuse()
        self._sample: tuple[float, Sampled] | None = None
        self._wanted: float | None = None
        self._halted_at: float | None = None
        self._traced_at: float | None = None
        """Time since which /proc shows a stop."""
        self._stuck_at: float | None = None
        self._stuck_looks = 0
        self._across = Pace()
        """Pace of steps between which the phase has changed."""
        self._slow: Pace | None = None
        """The one that is slow, as seen last."""
        self._slow_at = now
        self._finite = Finiteness()
        self._checkpoints = Checkpoints()
        self._alarms: dict[Detector, Alarm] = {}
        self._counted: tuple[str, bool] = (STARTUP, False)
        self._late_since: float | None = None

    @property
    def phase(self) -> str:
        """The script's word, else by its steps."""
        page = self._page
        if page.phase and not 0 < page.calls <= WARM_UP_CALLS:
            return page.phase
        if page.calls > WARM_UP_CALLS:
            return TRAIN
        if page.calls:
            return FIRST_STEP
        if self._taught.start_seconds and not self._is_warm:
            return STARTUP
        has_rhythm = any(self._is_learned(one) for one in (SignSource.OUTPUT, SignSource.WORK))
        return TRAIN if has_rhythm else STARTUP

    def taught(self) -> Taught:
        """For the next attempt."""
        old, starts = self._taught, self._start_seconds
        return Taught(
            {key: phase.rhythm for key, phase in self._phases.items()},
            self._output,
            max(old.start_seconds, starts.get(SignSource.STEP, starts.get(SignSource.OUTPUT, 0.0))),
            old.reports_steps or SignSource.STEP in starts,
        )

    # Readings

    def read_page(self, page: Page, now: float) -> None:
        """The page was read."""
        old, self._page = self._page, page
        if page.visit != old.visit:
            self._change_phase(old, page)
        if page.calls > old.calls:
            self._step(old, page, now)
        if page.checkpoint_at is not None and (
            old.checkpoint_at is None or page.checkpoint_at > old.checkpoint_at + SAME_SECONDS
        ):
            self.hits += 1
            excused = self._save_excuse.take(page.checkpoint_at)
            self._checkpoints.add(page.checkpoint_at, page.checkpoint_step, excused)
        self._see_start(now)
        missing = self._checkpoints.missing(now, page.step)
        self._set(Detector.CHECKPOINT, missing, now, self._checkpoints.at)
        self._count_changes()

    def wrote(self, event: Wrote) -> None:
        """There is output since the last look."""
        self.hits += 1
        self._writes += 1
        self._see_start(event.at)
        source = self._source
        # Gaps of another start-up would count as such of the rhythm that is known.
        if self._has_written and (self._is_warm or not self._taught.start_seconds):
            gap = event.longest_gap - self._output_excuse.take(event.at)
            self._output.learn(gap, event.at - self._wrote_at)
            if source is SignSource.OUTPUT and event.count:
                pace = self._at_phase().pace
                pace.add(max(0.0, event.at - self._wrote_at) / event.count, event.at)
                self._see_pace(pace, event.at)
        self._has_written = True
        self._wrote_at = max(self._wrote_at, event.at)
        if source is not SignSource.STEP or not self._is_warm:
            self._return(self._output, event.at)
        self._count_changes()

    def sampled(self, event: Sampled, now: float) -> None:
        """/proc was read, after page and output.  Silence is judged here."""
        if self._sample is None:
            self._sample = (now, event)
        elif now - self._sample[0] >= SAMPLE_SECONDS_MIN:
            self._measure(self._sample[1], event, now - self._sample[0], now)
            self._sample = (now, event)
        self._see_stop(event.state, now)
        self._see_stuck(event.state, now)
        self._judge(now)
        if Detector.SILENT in self._modes:
            self._note_late(self._late_sign(now))
        self._count_changes()

    def halted(self, now: float) -> None:
        """By a signal."""
        self._halted_at = now if self._halted_at is None else self._halted_at

    def continued(self, now: float) -> None:
        """By a signal; what the stop took is no rhythm."""
        if self._halted_at is not None:
            self._excuse(now - self._halted_at, now)
        self._halted_at = None
        self._clear(Detector.STOPPED)

    def stood_still(self, seconds: float, now: float) -> None:
        """The agent itself did, and perhaps the whole machine: no rank is to blame for it."""
        self._excuse(seconds, now)
        self._sign_at += seconds
        self._wrote_at += seconds
        self._work_at += seconds
        self._calm_at += seconds
        self._began_at += seconds
        if self._halted_at is not None:
            self._halted_at += seconds
        self._sample = self._wanted = self._traced_at = self._stuck_at = None

    # When to look

    @property
    def due_at(self) -> float:
        """Time of the next look, or of a stop that is becoming an alarm."""
        is_told = Detector.STOPPED in self._alarms or Detector.STOPPED not in self._modes
        if self._halted_at is None or is_told:
            return self.look_at
        return min(self.look_at, self._halted_at + STOPPED_SECONDS)

    def look(self, now: float, until: float) -> bool | None:
        """If a look is due by `until`: is it at /proc too?  None: it is not due."""
        if self._halted_at is not None and now >= self._halted_at + STOPPED_SECONDS:
            self._set(Detector.STOPPED, "stopped by a signal", now, self._halted_at)
        if until < self.look_at:
            return None
        self.look_at = now + LOOK_SECONDS
        is_deep = until >= self._process_at or self._is_suspect(now)
        if is_deep:
            self._process_at = now + PROCESS_SECONDS
        return is_deep

    def view(self) -> RankWatch:
        """For the report."""
        page, phase, verdict = self._page, self.phase, self._verdict()
        usual = verdict.allowed.idle if verdict and self._is_rhythmic(verdict) else None
        patience, at = self._patience(), self._phases.get(phase)
        return RankWatch(
            rank=self.rank,
            phase=phase,
            step=page.step,
            first_step=page.first_step,
            first_step_at=page.first_step_at,
            step_at=page.step_at if page.calls else None,
            step_seconds=self._step_seconds(at),
            sign_at=self._last_sign(),
            allowed_seconds=usual,
            checkpoint_step=page.checkpoint_step,
            metrics=page.metrics,
            alarms=tuple(self._alarms.values()),
            bound=(patience.bound if patience else Bound.START).value,
            look_seconds=patience.look_seconds if patience else None,
            act_seconds=patience.act_seconds if patience else None,
            late_since=self._late_since,
        )

    def _step_seconds(self, at: PhaseRhythm | None) -> float | None:
        if not self._page.calls:
            return None
        seconds = at.pace.seconds if at else None
        return self._across.seconds if seconds is None else seconds

    def last_view(self) -> RankWatch:
        """After its end: nothing is found any more."""
        view = replace(self.view(), allowed_seconds=None, alarms=())
        return replace(view, look_seconds=None, act_seconds=None, late_since=None)

    # Steps and phases

    def _change_phase(self, old: Page, new: Page) -> None:
        self.hits += 1
        is_next = new.visit == old.visit + 1 and (old.phase or old.calls > WARM_UP_CALLS)
        if is_next and not 0 < old.calls <= WARM_UP_CALLS:
            gap = (
                new.phase_at - max(old.step_at, old.phase_at) - self._step_excuse.take(new.phase_at)
            )
            self._at_phase(old).rhythm.end_visit(gap)
        self._return(self._at_phase(old).rhythm, new.phase_at)
        self._sign(new.phase_at)

    def _step(self, old: Page, new: Page, now: float) -> None:
        self.hits += 1
        calls = new.calls - old.calls
        start = max(old.step_at, new.phase_at) if new.phase_at <= new.step_at else old.step_at
        seconds = max(0.0, new.step_at - start - self._step_excuse.take(new.step_at))
        phase = self._at_phase(new)
        if old.calls >= WARM_UP_CALLS:
            gap = seconds
            if calls > 1 and new.visit_calls > calls:
                gap = min(gap, new.longest_gap)
            phase.rhythm.learn(gap, seconds)
            self._add_pace(old, new, seconds / calls, now)
        self._return(phase.rhythm, new.step_at)
        self._sign(new.step_at)
        self._see_metrics(old, new, phase, now)

    def _see_metrics(self, old: Page, new: Page, phase: PhaseRhythm, now: float) -> None:
        self._finite.add(old, new)
        bad = self._finite.why if self._finite.is_bad(new.calls) else ""
        self._set(Detector.NAN, bad, now, self._finite.since, self._finite.step)
        loss = new.metrics.get("loss")
        if loss is not None and math.isfinite(loss):
            phase.loss.add(loss, new.step_at)
        level = phase.loss
        self._set(Detector.SPIKE, level.why if level.is_high else "", now, level.since)

    def _add_pace(self, old: Page, new: Page, seconds: float, now: float) -> None:
        """Add the pace of steps made in one visit of a phase, or across visits.  Of the latter a
        block needs looks in a row, as there are where each step has its phases: pauses between
        visits that hold many steps are no steps."""
        if new.visit == old.visit:
            self._across.interrupt()
            pace = self._at_phase(new).pace
        else:
            pace, seconds = self._across, (new.step_at - old.step_at) / (new.calls - old.calls)
        pace.add(max(0.0, seconds), now)
        self._see_pace(pace, now)

    def _see_pace(self, pace: Pace, now: float) -> None:
        if pace.is_slow(now):
            self._slow, self._slow_at = pace, now
            self._set(Detector.SLOW, pace.why, now, pace.slow_since)
        elif pace is self._slow or now - self._slow_at >= SLOW_PHASE_SECONDS:
            # Another phase at its usual pace says nothing of the one that was slow, while that
            # still comes.
            self._slow = None
            self._clear(Detector.SLOW)

    def _key(self, page: Page) -> str:
        return page.phase or TRAIN

    def _at_phase(self, page: Page | None = None) -> PhaseRhythm:
        key = self._key(page or self._page)
        if key not in self._phases and len(self._phases) >= PHASES_MAX:
            key = ""
        rhythm = self._phases.get(key)
        if rhythm is None:
            rhythm = self._phases[key] = PhaseRhythm(key)
        return rhythm

    # Silence

    @property
    def _source(self) -> SignSource:
        if self._page.calls or self._page.visit or self._taught.reports_steps:
            return SignSource.STEP
        return SignSource.OUTPUT if self._is_learned(SignSource.OUTPUT) else SignSource.WORK

    def _is_learned(self, source: SignSource) -> bool:
        rhythm = self._output if source is SignSource.OUTPUT else self._work
        return rhythm.is_learned(BY_SIGN[source])

    @property
    def _is_warm(self) -> bool:
        """The start-up of this attempt is over."""
        page = self._page
        if self._source is not SignSource.STEP:
            return self._writes > START_GAPS
        return (page.calls or page.visit) > WARM_UP_CALLS

    def _see_start(self, now: float) -> None:
        if self._is_warm:
            source = SignSource.STEP if self._source is SignSource.STEP else SignSource.OUTPUT
            self._start_seconds.setdefault(source, now - self._began_at)

    def _is_rhythmic(self, verdict: SilenceVerdict | None) -> bool:
        """True if it counts with other ranks; one that has only a bound counts while in alarm."""
        is_silent = any(silence in self._alarms for silence in SILENCES)
        return verdict is not None and (is_silent or not verdict.is_early)

    def _last_sign(self) -> float | None:
        match self._source:
            case SignSource.STEP:
                return self._sign_at
            case SignSource.OUTPUT:
                return self._wrote_at
            case SignSource.WORK:
                seen = self._has_worked or self._has_written
                return max(self._wrote_at, self._work_at) if seen else None

    def _verdict(self) -> SilenceVerdict | None:
        """None: still learning."""
        source = self._source
        match source:
            case SignSource.STEP:
                rhythm, since = self._at_phase().rhythm, self._sign_at
            case SignSource.OUTPUT:
                rhythm, since = self._output, self._wrote_at
            case SignSource.WORK if self._is_spinning():
                return None
            case SignSource.WORK:
                rhythm, since = self._work, max(self._wrote_at, self._work_at)
        allowed = self._allowed(source, rhythm)
        is_early = allowed is None and source is SignSource.STEP and self._is_warm
        if is_early:
            gap = max(self._page.longest_gap, rhythm.longest_seconds(BY_SIGN[source]))
            allowed = early(gap, self._page.visit_calls)
        if allowed is None:
            is_new = self._page.phase and self._page.calls > WARM_UP_CALLS
            allowed, is_early = (_NEW_PHASE if is_new else _START), True
        if self.is_ending:
            allowed = Allowed(
                ENDING.of(allowed.idle), ENDING.of(allowed.spinning), ENDING.of(allowed.working)
            )
        return SilenceVerdict(source, rhythm, allowed, since, is_early)

    def _allowed(self, source: SignSource, rhythm: Rhythm) -> Allowed | None:
        if source is not SignSource.WORK and not self._is_warm:
            return self._taught.start()
        return rhythm.allowed(BY_SIGN[source], self._floor_seconds)

    def _is_spinning(self) -> bool:
        """True if it waits at full speed, or works: its processors do not show which."""
        return self._sample is not None and self._sample[0] - self._calm_at >= PROCESS_SECONDS

    def _limits(self, verdict: SilenceVerdict) -> tuple[tuple[float, Detector, str], ...]:
        return verdict.limits(self._wrote_at, self._work_at, self._calm_at)

    def _judge(self, now: float) -> None:
        """Raise an alarm if the silence is too long, and else look next when it will be, if that
        is before the next look."""
        self.look_at = now + LOOK_SECONDS
        verdict = self._verdict()
        if verdict is None or any(silence in self._alarms for silence in SILENCES):
            return
        limits = self._limits(verdict)
        for limit, detector, why in limits:
            if now >= limit:
                seconds = now - verdict.since
                text = f"{why} for {seconds:.0f} s; {verdict.allowed.idle:.0f} s is usual at most"
                self._set(detector, text, now, verdict.since)
                return
        limit = min(at for at, _, _ in limits)
        if limit < self.look_at:
            self.look_at = max(limit, now + LOOK_SECONDS / 10)

    def _is_suspect(self, now: float) -> bool:
        if self._traced_at is not None or self._stuck_at is not None:
            return True
        if self._late_since is None and self._late_sign(now) is not None:
            return True
        verdict = self._verdict()
        if verdict is None or verdict.allowed in (_START, _NEW_PHASE):
            return False
        return now - verdict.since >= max(LOOK_SECONDS, verdict.allowed.idle / 4)

    # Lateness

    def _patience(self) -> Patience | None:
        """Return the silence after which a look is due; None: only an alarm leads to one,
        as in a start-up."""
        if self.is_ending or (self._taught.start_seconds and not self._is_warm):
            return None
        if self._source is SignSource.STEP:
            return self._step_patience() if self._is_warm else None
        longest = self._output.longest_seconds(BY_SIGN[SignSource.OUTPUT])
        if (patience := by_output(self._output, longest)) is not None:
            return patience
        allowed = self._work.allowed(BY_SIGN[SignSource.WORK], self._floor_seconds)
        if allowed is None:
            return None
        seconds = LATE_SPIN_SECONDS if self._is_spinning() else allowed.idle
        return Patience(Bound.WORK, seconds, seconds)

    def _step_patience(self) -> Patience | None:
        at, limits = self._at_phase(), BY_SIGN[SignSource.STEP]
        longest = at.rhythm.longest_seconds(limits)
        if at.rhythm.is_main:
            steps = self._page.calls - WARM_UP_CALLS
            patience = by_steps(at.rhythm, longest, steps, self._step_seconds(at))
            if patience is None:
                return None
            return replace(patience, act_seconds=max(patience.act_seconds, self._floor_seconds))
        allowed = at.rhythm.allowed(limits, self._floor_seconds)
        return Patience(Bound.PHASE, allowed.idle, allowed.idle) if allowed else None

    def _silent_since(self, patience: Patience) -> float:
        match patience.bound:
            case Bound.OUTPUT:
                return self._wrote_at
            case Bound.WORK if self._is_spinning():
                return max(self._wrote_at, self._calm_at)
            case Bound.WORK:
                return max(self._wrote_at, self._work_at)
            case _:
                return self._sign_at

    def _late_sign(self, now: float) -> float | None:
        """Return the last sign of life if it was too long ago; None: the rank is not late."""
        patience = self._patience()
        if patience is None:
            return None
        since = self._silent_since(patience)
        return since if now - since >= patience.look_seconds else None

    def _note_late(self, since: float | None) -> None:
        """Keep the last sign of life of a rank that is late; None: it is not."""
        if (self._late_since is None) != (since is None):
            self._change()
        self._late_since = since

    def _sign(self, at: float) -> None:
        self._sign_at = max(self._sign_at, at)

    def _return(self, rhythm: Rhythm, at: float) -> None:
        """A sign of the source that counts."""
        for detector in SILENCES:
            alarm = self._alarms.get(detector)
            if alarm is not None and at > alarm.since:
                rhythm.excuse()
                self._clear(detector)
        self._clear(Detector.STUCK)
        self._stuck_at = None

    def _excuse(self, seconds: float, now: float) -> None:
        for excuse in (self._step_excuse, self._output_excuse, self._save_excuse):
            excuse.add(seconds, now)

    # Processes

    def _measure(self, old: Sampled, new: Sampled, seconds: float, now: float) -> None:
        share = (new.cpu_seconds - old.cpu_seconds) / seconds
        read = (new.io_bytes - old.io_bytes) / seconds
        # A process below that has ended takes its figures along: it did something.
        has_less = share < 0 or read < 0
        if has_less or share >= WORK_SHARE or read >= WORK_BYTES:
            if self._has_worked:
                self._work.learn(now - self._work_at)
            if self._source is SignSource.WORK or not self._is_warm:
                self._return(self._work, now)
            self._has_worked, self._work_at = True, now
            self._stuck_at = None
        # Its share of a node with nothing else to do: a spin is one on a busy node too.
        wanted = share + max(0.0, new.waited_seconds - old.waited_seconds) / seconds
        is_steady = self._wanted is not None and abs(wanted - self._wanted) <= SPIN_CHANGE
        if has_less or not is_steady or wanted < SPIN_SHARE or read >= SPIN_BYTES:
            self._calm_at = now
        self._wanted = wanted

    def _see_stop(self, state: str, now: float) -> None:
        if not state:
            return
        if state not in ("T", "t"):
            self._traced_at = None
            if self._halted_at is None or now - self._halted_at >= SAMPLE_SECONDS_MIN:
                self._halted_at = None
                self._clear(Detector.STOPPED)
            return
        if self._traced_at is None:
            self._traced_at = now
        elif now - self._traced_at >= (STOPPED_SECONDS if state == "T" else TRACED_SECONDS):
            why = "stopped by a signal" if state == "T" else "stopped by a debugger"
            self._set(Detector.STOPPED, why, now, self._halted_at or self._traced_at)

    def _see_stuck(self, state: str, now: float) -> None:
        if state != "D":
            self._stuck_at = None
            self._clear(Detector.STUCK)
        elif self._stuck_at is None:
            self._stuck_at, self._stuck_looks = now, 1
        else:
            self._stuck_looks += 1
            if now - self._stuck_at >= STUCK_SECONDS and self._stuck_looks > STUCK_SECONDS / 2:
                why = f"in the kernel, state D, for {now - self._stuck_at:.0f} s"
                self._set(Detector.STUCK, why, now, self._stuck_at)

    # Alarms

    def _set(
        self,
        detector: Detector,
        why: str,
        now: float,
        since: float | None = None,
        step: int | None = None,
    ) -> None:
        """Raise, with a reason; clear, with none."""
        if not why:
            self._clear(detector)
        elif detector not in self._alarms and detector in self._modes:
            at = now if since is None else since
            self._alarms[detector] = Alarm(detector.value, at, now, why, step)
            self._change()

    def _clear(self, detector: Detector) -> None:
        if self._alarms.pop(detector, None) is not None:
            self._change()

    def _count_changes(self) -> None:
        if self._late_since is not None:
            patience = self._patience()
            if patience is None or self._silent_since(patience) > self._late_since:
                self._note_late(None)
        told = (self.phase, self._is_rhythmic(self._verdict()))
        if told != self._counted:
            self._counted = told
            self._change()

    def _change(self) -> None:
        """Note a change that is to be published at once."""
        self.turns += 1
        self.hits += 1


STILL_SECONDS = 1.0
"""A driver later than this was paused."""
TOGETHER_SECONDS = 0.1
"""Looks that are due so soon are made with the others."""


class Watchdog:
    """The ranks of one agent.  Events of a rank that does not run are ignored.

    `floor_seconds`: a silence shorter than this is never one; across a network whose links recover
    by themselves give 35 (a link flap takes up to 30).  `taught`: by an attempt before."""

    def __init__(
        self,
        ranks: range,
        modes: Mapping[Detector, Mode],
        floor_seconds: float = STEP_FLOOR_SECONDS,
        taught: Mapping[int, Taught] | None = None,
    ) -> None:
        self._ranks = ranks
        self._modes = frozenset(
            detector for detector in Detector if modes.get(detector) is not Mode.OFF
        )
        self._floor_seconds = floor_seconds
        self._states: dict[int, RankState] = {}
        self._next = math.inf
        self._past = [0, 0]
        """Turns and hits of states that are gone."""
        self._ended: dict[int, RankWatch] = {}
        self._before = dict(taught or {})
        self._taught: dict[int, Taught] = {}
        """Rhythms learned from ranks that have ended."""

    @property
    def turns(self) -> int:
        """Raised by what is to be published at once."""
        return self._past[0] + sum(state.turns for state in self._states.values())

    @property
    def hits(self) -> int:
        """Raised by any news."""
        return self._past[1] + sum(state.hits for state in self._states.values())

    def deadline(self) -> float | None:
        """Return when `Tick` is due."""
        return self._next if self._next < math.inf else None

    def views(self) -> tuple[RankWatch, ...]:
        """Every rank that has started, as it stands."""
        states = self._states
        return tuple(
            states[rank].view() if rank in states else self._ended[rank]
            for rank in self._ranks
            if rank in states or rank in self._ended
        )

    def taught(self) -> Mapping[int, Taught]:
        """Return the knowledge of each rank for the watchdog of the next attempt."""
        living = {rank: state.taught() for rank, state in self._states.items()}
        return self._before | self._taught | living

    def step(self, event: WatchdogEvent, now: float) -> list[WatchdogEffect]:
        """Take in an event; what is to be read now."""
        if now > self._next + STILL_SECONDS:
            self._stood_still(now)
        effects: list[WatchdogEffect] = []
        match event:
            case RankStarted():
                self._start(event.rank, now)
            case Tick():
                effects = self._look(now)
            case Ended():
                self._end(event.rank)
            case PageRead() | Wrote():
                # The most frequent: they move no deadline.
                self._feed_rank(event, now)
                return effects
            case _:
                self._feed_rank(event, now)
        self._find_next()
        return effects

    def _find_next(self) -> None:
        self._next = min((state.due_at for state in self._states.values()), default=math.inf)

    def _feed_rank(
        self, event: PageRead | Wrote | Sampled | Halted | Continued, now: float
    ) -> None:
        state = self._states.get(event.rank)
        if state is None:
            return
        match event:
            case PageRead():
                state.read_page(event.page, now)
            case Wrote():
                state.wrote(event)
            case Sampled():
                state.sampled(event, now)
            case Halted():
                state.halted(now)
            case Continued():
                state.continued(now)

    def _start(self, rank: int, now: float) -> None:
        if rank not in self._ranks:
            return
        self._forget(rank)
        self._ended.pop(rank, None)
        self._states[rank] = RankState(
            rank, now, self._modes, self._floor_seconds, self._before.get(rank, Taught())
        )

    def _end(self, rank: int) -> None:
        state = self._forget(rank)
        if state is None:
            return
        self._ended[rank] = state.last_view()
        self._taught[rank] = state.taught()
        for other in self._states.values():
            other.is_ending = True

    def _forget(self, rank: int) -> RankState | None:
        state = self._states.pop(rank, None)
        if state is not None:
            self._past[0] += state.turns + 1
            self._past[1] += state.hits + 1
        return state

    def _look(self, now: float) -> list[WatchdogEffect]:
        deep: list[int] = []
        shallow: list[int] = []
        if now < self._next:
            return []
        for state in self._states.values():
            # A little early, to be read together.
            is_deep = state.look(now, now + TOGETHER_SECONDS)
            if is_deep is not None:
                (deep if is_deep else shallow).append(state.rank)
        wanted = ((deep, True), (shallow, False))
        return [Sample(tuple(ranks), is_deep) for ranks, is_deep in wanted if ranks]

    def _stood_still(self, now: float) -> None:
        for state in self._states.values():
            state.stood_still(now - self._next, now)
        self._find_next()

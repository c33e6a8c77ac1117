"""When the template of warm workers is started, workers are parked, and a start may be warm.

Nothing competes with a start: the template imports once an attempt has told a step or its imports
have been quiet.  Where it need not learn what to import it begins before the first start, which
interrupts it if there are no processors to spare; so it does in a spare, once others have told
what they import.  Forks cost little: those used are replaced soon
after a start, and one that finds too few has them made.  A template that failed, or whose files
have changed, is started anew.  What workers import later is taught to it, now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from unbroken.core.tick import Tick

QUIET_SECONDS = 10.0
FRESH_SECONDS = 1.0
"""How long the answer holds that no file has changed."""
FIRST = "the first start"
FAILURES_MAX = 3
"""Templates that may fail in a row; then every start is cold."""
RETRY_SECONDS = 10.0
IMPORT_SECONDS_MAX = 600.0
"""Longest time that a template may import: an import may hang."""
PARK_SECONDS = 0.3
"""After a start, which has the processors until then."""
LESSON_QUIET_SECONDS = 3.0
"""Time without a new import after which a lesson is complete, while training goes on."""
LOOK_SECONDS = 30.0
"""Until the first look for what has been imported since; twice as long after each lesson."""


@dataclass(frozen=True, slots=True)
class Named:
    """What is to be imported is known before a start: from the job, or from other agents."""

    is_news: bool = True
    """There are names that the template has not been told."""


@dataclass(frozen=True, slots=True)
class Began:
    """The training workers of an attempt have been started, so many of them from parked ones."""

    warm: int = 0


@dataclass(frozen=True, slots=True)
class StepTold:
    """A worker of the attempt has told a step."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Answer to `LookAtImports`: when a worker last imported something; None: not known."""

    at: float | None
    is_news: bool = False
    """There are names that the template has not been told."""


@dataclass(frozen=True, slots=True)
class StopBegan:
    """The workers are being ended."""


@dataclass(frozen=True, slots=True)
class TemplateReady:
    """It has imported, and found itself safe."""


@dataclass(frozen=True, slots=True)
class TemplateFailed:
    """It is unsafe, or has ended; whom it has parked are gone with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """One more worker waits for its order."""


@dataclass(frozen=True, slots=True)
class ParkedEnded:
    """A parked worker ended without an order."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Answer to `AskFresh`; `changed` is a file that is another by now, empty: none is."""

    changed: str = ""


WarmEvent = (
    Named | Began | StepTold | Imported | StopBegan | TemplateReady | TemplateFailed | Parked
    | ParkedEnded | Checked | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LookAtImports:
    """Answer: `Imported`."""


@dataclass(frozen=True, slots=True)
class StartTemplate:
    """Answer: `TemplateReady` or `TemplateFailed`."""


@dataclass(frozen=True, slots=True)
class PauseTemplate:
    """It imports, and workers need the processors."""


@dataclass(frozen=True, slots=True)
class ResumeTemplate:
    """It may go on."""


@dataclass(frozen=True, slots=True)
class Teach:
    """Let it import what is new, and everyone end who is parked; answers as for `StartTemplate`."""


@dataclass(frozen=True, slots=True)
class EndTemplate:
    """With everyone who is parked."""


@dataclass(frozen=True, slots=True)
class Park:
    """Let the template park so many more; answer: as many `Parked`."""

    count: int


@dataclass(frozen=True, slots=True)
class AskFresh:
    """Let the template look at its files; answer: `Checked`."""


WarmEffect = (
    LookAtImports | StartTemplate | PauseTemplate | ResumeTemplate | Teach | EndTemplate | Park
    | AskFresh
)  # fmt: skip


class Template(Enum):
    """How the template stands."""

    MISSING = "missing"
    IMPORTING = "importing"
    READY = "ready"


class Warm:
    """Feed it what happens; `refusal` says why a start has to be cold."""

    def __init__(self, nproc: int, has_spare: bool = True) -> None:
        self._nproc = nproc
        self._has_spare = has_spare
        """There are more processors than workers."""
        self.template = Template.MISSING
        self._why_missing = FIRST
        self._failures = 0
        self._parked = self._asked_for = 0
        self._is_first, self._is_training, self._is_paused = True, False, False
        self._is_settled = True
        self._quiet_at: float | None = None
        """When imports are quiet, if nothing more is imported; None: nobody waits for that."""
        self._park_at: float | None = None
        self._retry_at: float | None = None
        self._late_at: float | None = None
        """When a template has imported for too long."""
        self._look_at: float | None = None
        self._look_seconds = LOOK_SECONDS
        self._asked_at: float | None = None
        self._fresh_at: float | None = None
        """When it was asked for what was then answered."""

    @property
    def has_given_up(self) -> bool:
        """True if every start is cold from now on."""
        return self._failures >= FAILURES_MAX

    def deadline(self) -> float | None:
        """When `Tick` is due; None: time changes nothing."""
        times = (self._quiet_at, self._park_at, self._retry_at, self._look_at, self._late_at)
        return min((at for at in times if at is not None), default=None)

    def is_unsure(self, count: int, now: float) -> bool:
        """True if an answer of the template is all that a warm start of so many lacks."""
        return self.template is Template.READY and (self._parked < count or not self._is_fresh(now))

    def refusal(self, now: float) -> str:
        """Why a start has to be cold now; empty: it may be warm."""
        if self.template is Template.MISSING:
            return self._why_missing
        if self.template is Template.IMPORTING:
            return "the template is not ready yet"
        if not self._parked:
            return "nobody is parked yet"
        return "" if self._is_fresh(now) else "the template does not answer"

    def ask(self, count: int, now: float) -> list[WarmEffect]:
        """Have files looked at and workers parked for a start of so many, as far as that has not
        been asked."""
        if self.template is not Template.READY:
            return []
        effects: list[WarmEffect] = []
        if self._asked_at is None or now > self._asked_at + FRESH_SECONDS:
            self._asked_at = now
            effects += [AskFresh()]
        return effects + self._park(count)

    def step(self, event: WarmEvent, now: float) -> list[WarmEffect]:
        """Take one event; what must be done, in order."""
        match event:
            case Named(is_news):
                return self._named(is_news, now)
            case Began(warm=warm):
                return self._began(warm, now)
            case StepTold():
                return self._settle(now)
            case Tick():
                return self._due(now)
            case Imported():
                return self._imported(event, now)
            case StopBegan():
                self._is_training = False
                self._quiet_at = self._look_at = self._park_at = self._retry_at = None
                return [*self._resume(), *self.ask(0, now)]
            case TemplateReady() | TemplateFailed() | Checked():
                return self._told(event, now)
            case Parked():
                self._parked += 1
                self._asked_for = max(0, self._asked_for - 1)
                self._failures = 0
                return []
            case ParkedEnded():
                self._parked = max(0, self._parked - 1)
                return []

    def _named(self, is_news: bool, now: float) -> list[WarmEffect]:
        if self._is_training:
            return []  # A lesson will have it.
        if self.template is not Template.READY:
            return self._start(now)
        if not is_news or self._asked_for:
            return []  # It is said again.
        self._parked = 0
        return [self._importing(Teach(), now)]

    def _began(self, warm: int, now: float) -> list[WarmEffect]:
        self._parked -= warm
        self._is_training, self._is_settled = True, False
        self._quiet_at, self._look_at = now + QUIET_SECONDS, None
        self._park_at = now + PARK_SECONDS
        is_first, self._is_first = self._is_first, False
        if self.template is not Template.IMPORTING or self._has_spare or not is_first:
            return []
        self._is_paused = True
        return [PauseTemplate()]

    def _resume(self) -> list[WarmEffect]:
        effects: list[WarmEffect] = [ResumeTemplate()] if self._is_paused else []
        self._is_paused = False
        return effects

    def _due(self, now: float) -> list[WarmEffect]:
        effects: list[WarmEffect] = []
        if self._park_at is not None and now >= self._park_at:
            self._park_at = None
            effects += self._park(self._nproc)
            if self._has_spare and self._why_missing != FIRST:
                # What it is to import is known.
                effects += self._start(now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            effects += self._start(now)
        if self._late_at is not None and now >= self._late_at:
            self._failures += 1
            effects += self._end(f"the template has imported for {IMPORT_SECONDS_MAX:g} s", now)
        for at in (self._quiet_at, self._look_at):
            if at is not None and now >= at:
                return [*effects, LookAtImports()]
        return effects

    def _imported(self, event: Imported, now: float) -> list[WarmEffect]:
        if not self._is_training:
            return []
        seconds = LESSON_QUIET_SECONDS if self._is_settled else QUIET_SECONDS
        quiet_at = now if event.at is None else event.at + seconds
        if not self._is_settled:
            if self._quiet_at is None or now < self._quiet_at:
                return []
            self._quiet_at = quiet_at
            return self._settle(now) if now >= quiet_at else []
        self._look_at = now + self._look_seconds
        if self.template is not Template.READY or not event.is_news:
            return self._park(self._nproc)
        if now < quiet_at or self._asked_for:
            self._look_at = max(quiet_at, now + PARK_SECONDS)
            return self._park(self._nproc)
        self._look_seconds *= 2
        self._parked = self._asked_for = 0
        return [self._importing(Teach(), now)]

    def _settle(self, now: float) -> list[WarmEffect]:
        if self._is_settled or not self._is_training:
            return []
        self._is_settled, self._quiet_at = True, None
        self._look_at = now + self._look_seconds
        effects = [*self._resume(), *self._start(now)]
        # What earlier attempts have imported.
        return [LookAtImports()] if self.template is Template.READY else effects

    def _start(self, now: float) -> list[WarmEffect]:
        if self.template is not Template.MISSING or self.has_given_up:
            return []
        return [self._importing(StartTemplate(), now)]

    def _importing(self, effect: WarmEffect, now: float) -> WarmEffect:
        self.template, self._late_at = Template.IMPORTING, now + IMPORT_SECONDS_MAX
        return effect

    def _park(self, count: int) -> list[WarmEffect]:
        missing = count - self._parked - self._asked_for
        if self.template is not Template.READY or missing <= 0:
            return []
        self._asked_for += missing
        return [Park(missing)]

    def _told(
        self, event: TemplateReady | TemplateFailed | Checked, now: float
    ) -> list[WarmEffect]:
        match event:
            case TemplateReady():
                self.template, self._late_at = Template.READY, None
                return self._park(self._nproc)
            case TemplateFailed(reason=reason):
                if self.template is Template.MISSING:
                    return []
                self._failures += 1
                return self._end(reason, now)
            case Checked(changed=""):
                self._fresh_at, self._asked_at = self._asked_at, None
                return []
            case Checked(changed=changed):
                return self._end(f"{changed} has changed", now)

    def _end(self, reason: str, now: float) -> list[WarmEffect]:
        self.template, self._why_missing = Template.MISSING, reason
        self._parked = self._asked_for = 0
        self._asked_at = self._fresh_at = self._late_at = None
        self._is_paused = False
        if self._is_training and self._is_settled and not self.has_given_up:
            self._retry_at = now + RETRY_SECONDS
        return [EndTemplate()]

    def _is_fresh(self, now: float) -> bool:
        return self._fresh_at is not None and now <= self._fresh_at + FRESH_SECONDS

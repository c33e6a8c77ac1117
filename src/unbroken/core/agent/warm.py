"""Schedule of warm starts: when the template is started, workers are parked, and a start may be
warm.

Nothing competes with a start. The template imports once an attempt has reported a step, or its
imports have been quiet. If the imports are known in advance, it begins before the first start. A
start interrupts it if no processors are to spare, unless the attempt before had no step either: it
must become ready in the end. The first start waits for it where an earlier run has learned the
imports: it imports once what each worker would. A spare begins once others have reported what
they import.

Forks cost little: used ones are replaced soon after a start, and a start that finds too few has
them made. A template that failed, or whose files have changed, is started again. Modules that
workers import later are added to it from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from unbroken.core.tick import Tick
from unbroken.wire.agent import LEFT_OUT_MAX

QUIET_SECONDS = 10.0
FRESH_SECONDS = 1.0
"""Seconds for which the answer holds that no file has changed."""
FIRST = "the first start"
FAILURES_MAX = 3
"""Templates that may fail in a row; after that every start is cold."""
RETRY_SECONDS = 10.0
IMPORT_SECONDS_MAX = 600.0
"""Seconds that a template may import at most: an import may hang."""
PARK_SECONDS = 0.3
"""Seconds after a start, which has the processors until then."""
LESSON_QUIET_SECONDS = 3.0
"""Seconds without a new import after which a lesson is complete, while training continues."""
LOOK_SECONDS = 30.0
"""Seconds until the first search for new imports; doubled after each lesson."""


@dataclass(frozen=True, slots=True)
class Named:
    """Modules to import are known before a start: from the job, an earlier run or other agents."""

    is_news: bool = True
    """True if some names have not been sent to the template."""


@dataclass(frozen=True, slots=True)
class Began:
    """The training workers of an attempt have been started; this number of them from parked
    ones."""

    warm: int = 0


@dataclass(frozen=True, slots=True)
class StepReported:
    """A worker of the attempt has reported a step."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Answer to `LookAtImports`: when a worker last imported something; None: not known."""

    at: float | None
    is_news: bool = False
    """True if some names have not been sent to the template."""


@dataclass(frozen=True, slots=True)
class StopBegan:
    """The workers are being ended."""


@dataclass(frozen=True, slots=True)
class TemplateReady:
    """The template has imported, and found itself safe to fork."""


@dataclass(frozen=True, slots=True)
class TemplateFailed:
    """The template is unsafe, or has ended; its parked workers are gone with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """One more worker is parked."""


@dataclass(frozen=True, slots=True)
class ParkedEnded:
    """A parked worker ended without an order."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Answer to `AskFresh`; `changed` is a file that has changed by now, empty: none has."""

    changed: str = ""


WarmEvent = (
    Named | Began | StepReported | Imported | StopBegan | TemplateReady | TemplateFailed | Parked
    | ParkedEnded | Checked | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LookAtImports:
    """Search for new imports of the workers. Answer: `Imported`."""


@dataclass(frozen=True, slots=True)
class StartTemplate:
    """Start the template. Answer: `TemplateReady` or `TemplateFailed`."""


@dataclass(frozen=True, slots=True)
class PauseTemplate:
    """Pause the template: it imports, and workers need the processors."""


@dataclass(frozen=True, slots=True)
class ResumeTemplate:
    """Resume the paused template."""


@dataclass(frozen=True, slots=True)
class Teach:
    """Have the template import new modules, and end all parked workers; answers as for
    `StartTemplate`."""


@dataclass(frozen=True, slots=True)
class EndTemplate:
    """End the template and all parked workers."""


@dataclass(frozen=True, slots=True)
class Park:
    """Have the template park this number of further workers; answer: as many `Parked`."""

    count: int


@dataclass(frozen=True, slots=True)
class AskFresh:
    """Have the template check its files; answer: `Checked`."""


WarmEffect = (
    LookAtImports | StartTemplate | PauseTemplate | ResumeTemplate | Teach | EndTemplate | Park
    | AskFresh
)  # fmt: skip


def left_out_lines(left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with its first module; the last line counts the others."""
    modules: dict[str, list[str]] = {}
    for module, reason in left_out.items():
        modules.setdefault(reason, []).append(module)
    lines = []
    for reason, names in [*modules.items()][: LEFT_OUT_MAX - 1]:
        others = f" and {len(names) - 1} more" if names[1:] else ""
        lines.append(f"{names[0]}{others}: {reason}")
    rest = sum(len(names) for names in [*modules.values()][LEFT_OUT_MAX - 1 :])
    return (*lines, f"{rest} more modules") if rest else tuple(lines)


class Template(Enum):
    """The state of the template."""

    MISSING = "missing"
    IMPORTING = "importing"
    READY = "ready"


class Warm:
    """The machine of warm starts. Feed it events; `refusal` gives the reason for a cold start."""

    def __init__(self, nproc: int, has_spare: bool = True) -> None:
        self._nproc = nproc
        self._has_spare = has_spare
        """True if there are more processors than workers."""
        self.template = Template.MISSING
        self._why_missing = FIRST
        self._failures = 0
        self._parked = self._asked_for = 0
        self._is_training = self._is_paused = False
        self._is_settled = True
        self._quiet_at: float | None = None
        """Time at which imports count as quiet, unless one follows; None: nothing waits for
        that."""
        self._park_at: float | None = None
        self._retry_at: float | None = None
        self._late_at: float | None = None
        """Time at which a template has imported for too long."""
        self._look_at: float | None = None
        self._look_seconds = LOOK_SECONDS
        self._asked_at: float | None = None
        self._fresh_at: float | None = None
        """Time of the question that the last answer about files belongs to."""

    @property
    def has_given_up(self) -> bool:
        """True if every start is cold from now on."""
        return self._failures >= FAILURES_MAX

    @property
    def is_preparing(self) -> bool:
        """True if workers will soon be parked for a whole start."""
        is_short = self._parked < self._nproc
        return self.template is Template.IMPORTING or (self.template is Template.READY and is_short)

    @property
    def may_import_more(self) -> bool:
        """True if parked workers may import what only a process of their rank may."""
        return self._is_training and self._is_settled and self.template is Template.READY

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None: time changes nothing."""
        times = (self._quiet_at, self._park_at, self._retry_at, self._look_at, self._late_at)
        return min((at for at in times if at is not None), default=None)

    def is_unsure(self, count: int, now: float) -> bool:
        """True if a warm start of this number of workers lacks nothing but the template's
        answer."""
        return self.template is Template.READY and (self._parked < count or not self._is_fresh(now))

    def refusal(self, now: float) -> str:
        """Return why a start has to be cold now; empty: it may be warm."""
        return self.obstacle() or ("" if self._is_fresh(now) else "the template does not answer")

    def obstacle(self) -> str:
        """Return why a start would be cold, whether or not files have changed; empty: nothing."""
        if self.template is Template.MISSING:
            return self._why_missing
        if self.template is Template.IMPORTING:
            return "the template is not ready yet"
        if not self._parked:
            return "nobody is parked yet"
        return ""

    def ask(self, count: int, now: float) -> list[WarmEffect]:
        """Return the orders to check files and park workers for a start of this size, unless
        already given."""
        if self.template is not Template.READY:
            return []
        effects: list[WarmEffect] = []
        if self._asked_at is None or now > self._asked_at + FRESH_SECONDS:
            self._asked_at = now
            effects += [AskFresh()]
        return effects + self._park(count)

    def step(self, event: WarmEvent, now: float) -> list[WarmEffect]:
        """Take one event; return the orders, in order."""
        match event:
            case Named(is_news):
                return self._named(is_news, now)
            case Began(warm=warm):
                return self._began(warm, now)
            case StepReported():
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
                return self._template_reported(event, now)
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
            return []  # A lesson will include it.
        if self.template is not Template.READY:
            return self._start(now)
        if not is_news or self._asked_for:
            return []  # It will be reported again.
        self._parked = 0
        return [self._importing(Teach(), now)]

    def _began(self, warm: int, now: float) -> list[WarmEffect]:
        self._parked -= warm
        was_settled, self._is_training, self._is_settled = self._is_settled, True, False
        self._quiet_at, self._look_at = now + QUIET_SECONDS, None
        self._park_at = now + PARK_SECONDS
        if self.template is not Template.IMPORTING or self._has_spare or not was_settled:
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
                # The modules to import are known.
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
        # Modules that earlier attempts have imported.
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

    def _template_reported(
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

"""When the template of warm workers is started, workers are parked, and a start may be warm.

Nothing competes with a start: the template imports, and forks, once an attempt has told a step or
its imports have been quiet.  A template that failed, or whose files have changed, is started anew
by a later attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

QUIET_SECONDS = 10.0
FRESH_SECONDS = 1.0
"""How long the answer holds that no file has changed."""
FIRST = "the first start"
FAILURES_MAX = 3
"""Of templates in a row; then every start is cold."""


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


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Began | StepTold | Imported | StopBegan | TemplateReady | TemplateFailed | Parked
    | ParkedEnded | Checked | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LookAtImports:
    """Answer: `Imported`."""


@dataclass(frozen=True, slots=True)
class StartTemplate:
    """Answer: `TemplateReady` or `TemplateFailed`."""


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


Effect = LookAtImports | StartTemplate | EndTemplate | Park | AskFresh


class Template(Enum):
    """How the template stands."""

    MISSING = "missing"
    IMPORTING = "importing"
    READY = "ready"


class Warm:
    """Feed it what happens; `refusal` says why a start has to be cold."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self.template = Template.MISSING
        self._why_missing = FIRST
        self._failures = 0
        self._parked = self._asked_for = 0
        self._is_settled = True
        self._quiet_at: float | None = None
        """When imports are quiet, if nothing more is imported; None: nobody waits for that."""
        self._asked_at: float | None = None
        self._fresh_at: float | None = None
        """When it was asked for what was then answered."""

    def deadline(self) -> float | None:
        """When `Tick` is due; None: time changes nothing."""
        return self._quiet_at

    def is_unsure(self, now: float) -> bool:
        """Whether an answer of the template is all that a warm start lacks."""
        is_ready = self.template is Template.READY and self._parked > 0
        return is_ready and not self._is_fresh(now)

    def refusal(self, now: float) -> str:
        """Why a start has to be cold now; empty: it may be warm."""
        if self.template is Template.MISSING:
            return self._why_missing
        if self.template is Template.IMPORTING:
            return "the template is not ready yet"
        if not self._parked:
            return "nobody is parked yet"
        return "" if self._is_fresh(now) else "the template does not answer"

    def ask(self, now: float) -> list[Effect]:
        """Have files looked at, unless an answer is awaited."""
        if self._asked_at is not None and now <= self._asked_at + FRESH_SECONDS:
            return []
        self._asked_at = now
        return [AskFresh()]

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; what must be done, in order."""
        match event:
            case Began(warm=warm):
                self._parked -= warm
                self._is_settled = False
                self._quiet_at = now + QUIET_SECONDS
                return []
            case StepTold():
                return self._settle()
            case Imported() | Tick():
                return self._wait_for_quiet(event, now)
            case StopBegan():
                self._quiet_at = None
                return self.ask(now) if self.template is Template.READY else []
            case TemplateReady() | TemplateFailed() | Checked():
                return self._told(event)
            case Parked():
                self._parked += 1
                self._asked_for = max(0, self._asked_for - 1)
                self._failures = 0
                return []
            case ParkedEnded():
                self._parked = max(0, self._parked - 1)
                return []

    def _wait_for_quiet(self, event: Imported | Tick, now: float) -> list[Effect]:
        if self._quiet_at is None or now < self._quiet_at:
            return []
        if isinstance(event, Tick):
            return [LookAtImports()]
        if event.at is not None and now < event.at + QUIET_SECONDS:
            self._quiet_at = event.at + QUIET_SECONDS
            return []
        return self._settle()

    def _settle(self) -> list[Effect]:
        if self._is_settled:
            return []
        self._is_settled, self._quiet_at = True, None
        if self.template is Template.MISSING and self._failures < FAILURES_MAX:
            self.template = Template.IMPORTING
            return [StartTemplate()]
        return self._park()

    def _park(self) -> list[Effect]:
        missing = self._nproc - self._parked - self._asked_for
        if self.template is not Template.READY or not self._is_settled or missing <= 0:
            return []
        self._asked_for += missing
        return [Park(missing)]

    def _told(self, event: TemplateReady | TemplateFailed | Checked) -> list[Effect]:
        match event:
            case TemplateReady():
                self.template = Template.READY
                return self._park()
            case TemplateFailed(reason=reason):
                if self.template is Template.MISSING:
                    return []
                self._failures += 1
                return self._end(reason)
            case Checked(changed=""):
                self._fresh_at, self._asked_at = self._asked_at, None
                return []
            case Checked(changed=changed):
                return self._end(f"{changed} has changed")

    def _end(self, reason: str) -> list[Effect]:
        self.template, self._why_missing = Template.MISSING, reason
        self._parked = self._asked_for = 0
        self._asked_at = self._fresh_at = None
        return [EndTemplate()]

    def _is_fresh(self, now: float) -> bool:
        return self._fresh_at is not None and now <= self._fresh_at + FRESH_SECONDS

"""Detectors that watch a job by default, and their modes: `unbroken.dev/detectors`.

The annotation's text is `DETECTOR=MODE; DETECTOR=MODE`, DETECTOR `*` for all others. A detector is
promoted by evidence. In `shadow` it only counts what it would have done, and `unbroken describe`
shows how often it was right on this job.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from unbroken.errors import SpecError


class Detector(Enum):
    """A detector that runs on every rank."""

    STOPPED = "stopped"
    """The process was stopped by a signal (state T) and not continued."""
    SILENT = "silent"
    """No step, output or work for longer than learned from the run itself, on the whole job."""
    SPINNING = "spinning"
    """As silent, while a rank uses its processor in one place without progress."""
    STUCK = "stuck"
    """An uninterruptible wait in the kernel (state D)."""
    SLOW = "slow"
    """Steps take markedly longer than they did."""
    NAN = "nan"
    """A metric given to `unbroken.worker.progress` is no finite number."""
    SPIKE = "spike"
    """The metric `loss` has left the range that it kept."""
    CHECKPOINT = "checkpoint"
    """No checkpoint for several times the interval at which there were some."""


class Mode(Enum):
    """The actions that a detector may take; each mode includes the ones before it."""

    OFF = "off"
    SHADOW = "shadow"
    """Count what it would have done."""
    WARN = "warn"
    """Record an event on the job."""
    ACT = "act"
    """Open an incident, and recover."""


DEFAULTS: Mapping[Detector, Mode] = {
    Detector.STOPPED: Mode.ACT,
    Detector.SILENT: Mode.ACT,
    Detector.SPINNING: Mode.ACT,
    Detector.STUCK: Mode.WARN,
    Detector.SLOW: Mode.WARN,
    Detector.NAN: Mode.WARN,
    Detector.SPIKE: Mode.SHADOW,
    Detector.CHECKPOINT: Mode.WARN,
}


def read_detectors(annotation: str) -> dict[Detector, Mode]:
    """Return the mode of every detector. Raises SpecError."""
    given: dict[str, Mode] = {}
    names = {detector.value for detector in Detector}
    modes = {one.value for one in Mode}
    for part in filter(None, map(str.strip, annotation.split(";"))):
        name, is_pair, mode = (word.strip() for word in part.partition("="))
        if not is_pair or name not in {*names, "*"}:
            known = ", ".join(sorted(names))
            raise SpecError(f"{part!r} is not DETECTOR=MODE with one of: {known}, *")
        if mode not in modes:
            raise SpecError(f"{part!r}: the mode is one of off, shadow, warn, act")
        given[name] = Mode(mode)
    rest = given.get("*")
    return {
        detector: given.get(detector.value, rest or DEFAULTS[detector]) for detector in Detector
    }


def written(modes: Mapping[Detector, Mode]) -> dict[str, str]:
    """Return the modes for a start command."""
    return {detector.value: mode.value for detector, mode in modes.items()}


def from_command(given: Mapping[str, str]) -> dict[Detector, Mode]:
    """Read the detectors of a start command; those that are missing, or have unknown values, get
    defaults."""
    result = dict(DEFAULTS)
    for detector in Detector:
        if given.get(detector.value) in {mode.value for mode in Mode}:
            result[detector] = Mode(given[detector.value])
    return result

"""Resumption of a job after the loss of a node or a pod.

HyperPod's two annotations decide where one of them is set, else the default of the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES

TRUE: Final = "true"
"""Compared in lower case: the older HyperPod CLI writes `True`."""
DEFAULT_RETRIES: Final = 10
"""Restarts of a job without annotations, by default of the operator."""
RETRIES_MAX: Final = 1000
"""Largest default that an operator takes."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resumption of a job: whether it is resumed, and how often at most."""

    is_wanted: bool = False
    retries_max: int = 0
    is_default: bool = False
    """The job has neither annotation: the cluster resumes it."""


def has_annotations(annotations: Mapping[str, str]) -> bool:
    """True if the annotations of a job decide, valid or not, and no default."""
    return AUTO_RESUME in annotations or MAX_RETRIES in annotations


def resume_of(annotations: Mapping[str, str], default: int = 0) -> Resume:
    """Read the two annotations; a job whose annotations are invalid is not resumed.

    `default`: restarts that the cluster allows a job with neither; 0: it is not resumed.
    """
    if not has_annotations(annotations):
        return Resume(True, default, is_default=True) if default else Resume()
    if resume_problems(annotations) or annotations.get(AUTO_RESUME, "").lower() != TRUE:
        return Resume()
    return Resume(True, whole_number(annotations[MAX_RETRIES], 0, INT32_MAX) or 0)


def resume_problems(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """List what is wrong with the two annotations."""
    wanted, most = annotations.get(AUTO_RESUME), annotations.get(MAX_RETRIES)
    if wanted is not None and wanted.lower() not in (TRUE, "false"):
        return (f'annotation {AUTO_RESUME} must be "true" or "false", not {wanted[:40]!r}',)
    is_on = wanted is not None and wanted.lower() == TRUE
    if is_on and most is None:
        return (f'annotation {AUTO_RESUME} needs {MAX_RETRIES} beside it, such as "2"',)
    if most is not None and whole_number(most, 0, INT32_MAX) is None:
        return (f"annotation {MAX_RETRIES} must be a whole number from 0, not {most[:40]!r}",)
    if most is not None and not is_on:
        return (f'annotation {MAX_RETRIES} counts only with {AUTO_RESUME}: "true"',)
    return ()

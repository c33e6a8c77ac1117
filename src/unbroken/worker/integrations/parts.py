"""Common pieces of the adapters: parts of a snapshot that a framework makes late, and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unbroken.errors import SpecError
from unbroken.worker import context
from unbroken.worker.checkpointing.state import generators
from unbroken.worker.snapshot.restore import Restored
from unbroken.worker.snapshot.state import RNG

_used: set[tuple[str, int]] = set()
"""Names of trainings of this process, each with its attempt."""


class Late:
    """A part of a snapshot whose object is made after the state has been restored.

    Frameworks make optimizers inside of their training loop. Until `bind` gives the object, a
    restored state waits here.
    """

    def __init__(self) -> None:
        self._object: Any = None
        self._state: Any = None

    def state_dict(self) -> Any:
        """Return the state of the object; empty before there is one."""
        return {} if self._object is None else self._object.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Keep the state for the object."""
        self._state = state

    def take(self) -> Any:
        """Return the restored state, which is then no longer kept here."""
        state, self._state = self._state, None
        return state

    def bind(self, made: Any, is_wanted: bool = True) -> None:
        """Take the object; give it the restored state if there is one and it is wanted."""
        state, self._object = self.take(), made
        if state is not None and is_wanted:
            made.load_state_dict(state)


def missing(module: str, package: str, error: ImportError) -> SpecError:
    """Return the error of an adapter whose framework cannot be imported."""
    return SpecError(
        f"unbroken.worker.integrations.{module} needs the package {package}, which cannot be "
        f"imported ({error}): pip install '{package}'"
    )


def require(owner: object, methods: Iterable[str], place: str, library: str) -> None:
    """Raise SpecError if a part of a Trainer lacks a method that its adapter calls or replaces."""
    for method in methods:
        if not hasattr(owner, method):
            raise SpecError(
                f"keep_steps: this Trainer has no {place}{method}: install a {library} that was "
                "tried (docs/guide/frameworks.md)"
            )


def restored_generators(found: Restored) -> dict[str, Any] | None:
    """Return the generators of a restored step, to be set again once the data are ready; None:
    they were not restored."""
    return None if RNG in found.missing else generators()


def claim(name: str) -> str:
    """Return the name of a training, once in each attempt.

    Raises SpecError for the second training of a script with this name: after a fault, the state of
    one would be restored into the other.
    """
    key = (name, context().attempt)
    if key in _used:
        raise SpecError(
            f"keep_steps: this script has called it with the name {name!r} before: give each "
            "training a name of its own, keep_steps(..., name=...)"
        )
    _used.add(key)
    return name

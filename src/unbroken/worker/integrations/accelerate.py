"""Keep every step of a training loop with Accelerate.

    from unbroken.worker.integrations.accelerate import keep_steps

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps = keep_steps(accelerator)
    for step, batch in steps.of(loader, epochs=3):
        ...
        steps.save(step)

All that `prepare` was given is copied into memory of the agent. After a fault, `of` continues with
the batch after the newest step. Without an agent of unbroken, steps are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.worker import context, progress
from unbroken.worker.checkpointing.state import seed
from unbroken.worker.snapshot.snapshot import Snapshot

from .parts import claim, missing, restored_generators

WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Kinds of distributed training in which each rank has the whole state."""
log = Log(__name__, "unbroken.worker: ")


class Steps:
    """The steps of one training loop. `done` is the number of steps that are already made."""

    def __init__(self, accelerator: Any, snapshot: Snapshot | None) -> None:
        self.accelerator, self._snapshot = accelerator, snapshot
        found = None if snapshot is None else snapshot.restore()
        self.done = 0 if found is None else found.step
        self._generators = None if found is None else restored_generators(found)

    def of(self, loader: Any, epochs: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of each step, from 1, with its batch, without those that are done.

        `loader` comes from `prepare` and has a length. One batch is one step.
        """
        first, skipped = divmod(self.done, len(loader))
        step = self.done
        for epoch in range(first, epochs):
            # Before the loader is cut, which is a copy of it.
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            rest = loader
            if skipped:
                rest = self.accelerator.skip_first_batches(loader, skipped)
                if hasattr(rest, "set_epoch"):
                    rest.set_epoch(epoch)
                skipped = 0
            for batch in rest:
                step += 1
                found, self._generators = self._generators, None
                if found is not None:
                    seed(found)
                yield step, batch

    def save(self, step: int) -> None:
        """Keep the state as it is after this step, and report it. Call it on every rank.

        Within `accumulate`, the state is kept where gradients are applied: gradients are not kept.
        """
        if self._snapshot is not None and self.accelerator.sync_gradients:
            self._snapshot.save(step)
        progress(step)


def keep_steps(accelerator: Any, name: str = "training") -> Steps:
    """Restore the newest step of all that `accelerator.prepare` was given, and keep the next ones.

    Call it on every rank, after `prepare`. A script that trains several times calls it for each,
    with a `name`. State in shards (FSDP, DeepSpeed) is not copied into memory: its steps are
    reported. Raises SpecError if nothing has been prepared.
    """
    try:
        library = import_module("accelerate")
    except ImportError as error:
        raise missing("accelerate", "accelerate", error) from error
    if not isinstance(accelerator, library.Accelerator):
        raise SpecError(f"keep_steps takes an Accelerator, not {type(accelerator).__name__}")
    parts = _parts(accelerator)
    if not parts:
        raise SpecError("keep_steps: call accelerator.prepare(model, optimizer, ...) before")
    kind = accelerator.distributed_type.name
    if kind not in WHOLE:
        log.warning("steps are not kept in memory", reason=f"ranks may have shards: {kind}")
    is_kept = kind in WHOLE and context().is_managed
    snapshot = Snapshot(rng=True, name=claim(name), **parts) if is_kept else None
    return Steps(accelerator, snapshot)


def _parts(accelerator: Any) -> dict[str, Any]:
    """Return what `accelerator.save_state` would save."""
    models = [accelerator.unwrap_model(one) for one in accelerator._models]
    lists = {
        "model": models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "object": accelerator._custom_objects,
    }
    return {f"{name}{n}": one for name, found in lists.items() for n, one in enumerate(found)}

"""Keep every step of a Lightning Trainer.

    from unbroken.worker.integrations.lightning import keep_steps

    trainer = Trainer(max_steps=1000)
    keep_steps(trainer)
    trainer.fit(model, data)

A callback reports each step and copies the state of training into memory of the agent. After a
fault, `fit` resumes from there; from `ckpt_path` if one is given and is newer. Without an agent of
unbroken nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.worker import context, phase, progress
from unbroken.worker.checkpointing.state import seed
from unbroken.worker.snapshot.snapshot import Snapshot

from .parts import Late, claim, missing, require, restored_generators

SHARED = ("state_dict", "optimizer_states", "lr_schedulers")
"""Parts of a checkpoint of Lightning that all ranks have alike."""
LEFT_OUT = ("hyper_parameters", "hparams_name", "hparams_type")
"""Parts that `fit` does not read: they may hold any object."""
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies under which each rank has the whole state."""
log = Log(__name__, "unbroken.worker: ")


def keep_steps(trainer: Any, name: str = "training") -> None:
    """Keep each step of `trainer.fit`, and resume from the newest. Call it on every rank, before
    `fit`. A script with several Trainers calls it for each, with a `name`; the first `fit` of a
    Trainer is kept.

    State in shards (FSDP, DeepSpeed) is not copied into memory: its steps are reported, and
    training resumes from `ckpt_path`. Raises SpecError for a Trainer that cannot be resumed.
    """
    pytorch = _pytorch(trainer)
    if not context().is_managed:
        return
    connector = getattr(trainer, "_checkpoint_connector", None)
    require(connector, ("dump_checkpoint", "resume_start"), "_checkpoint_connector.", "Lightning")
    steps = _Steps(trainer, connector, claim(name))
    kind = type("KeepSteps", (_Callback, pytorch.Callback), {})
    trainer.callbacks.append(kind(steps))


def _pytorch(trainer: Any) -> Any:
    """Return the module of Lightning that the Trainer is from: it has two names."""
    try:
        if type(trainer).__module__.startswith("pytorch_lightning"):
            pytorch = import_module("pytorch_lightning")
        else:
            pytorch = import_module("lightning.pytorch")
    except ImportError as error:
        raise missing("lightning", "lightning", error) from error
    if not isinstance(trainer, pytorch.Trainer):
        raise SpecError(f"keep_steps takes a lightning Trainer, not {type(trainer).__name__}")
    return pytorch


class _Steps:
    """The steps of one Trainer, kept in memory where that is possible."""

    def __init__(self, trainer: Any, connector: Any, name: str) -> None:
        self.trainer, self._connector, self._name = trainer, connector, name
        self._resume_start, connector.resume_start = connector.resume_start, self._resume
        self._shared = Late()
        self._now: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._snapshot: Snapshot | None = None
        self._saved = 0
        self._generators: Any = None

    def _resume(self, *arguments: Any, **named: Any) -> None:
        """Load what `fit` was told to load; then the newest step, if that is newer."""
        self._resume_start(*arguments, **named)
        if self.trainer.state.fn != "fit":
            return
        if self._snapshot is not None:
            log.warning("steps are not kept in memory", reason="this Trainer has trained before")
            self._snapshot = None
            return
        if not any(one.__name__ in STRATEGIES for one in type(self.trainer.strategy).__mro__):
            log.warning(
                "steps are not kept in memory",
                reason=f"ranks may have shards: {type(self.trainer.strategy).__name__}",
            )
            return
        self._snapshot = Snapshot(
            checkpoint=self._shared, rng=True, extra=lambda: self._own, name=self._name
        )
        found = self._snapshot.restore()
        loaded = self._connector._loaded_checkpoint
        if found is None or loaded.get("global_step", -1) > found.step:
            return
        self._connector._loaded_checkpoint = {**self._shared.take(), **found.extra}
        self._generators = restored_generators(found)

    def begin(self) -> None:
        """Know the first step from now on."""
        self._saved = self.trainer.global_step
        self._shared.bind(self)

    def begin_batch(self) -> None:
        """Continue with the generators of the restored step, once the data are ready."""
        found, self._generators = self._generators, None
        if found is not None:
            seed(found)

    def save(self, step: int) -> None:
        """Copy the state of training, once for each step."""
        if self._snapshot is None or step == self._saved:
            return
        self._saved = step
        whole = self._connector.dump_checkpoint(weights_only=False)
        self._now = {name: whole.pop(name) for name in SHARED}
        self._own = {name: value for name, value in whole.items() if name not in LEFT_OUT}
        self._snapshot.save(step)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the parts that all ranks have alike, of the step that is being saved."""
        return self._now

    def end(self) -> None:
        """Wait for the last copy, and save no more."""
        if self._snapshot is not None:
            self._snapshot.close()


class _Callback:
    """Events of the Trainer."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin with the step that was restored."""
        self._steps.begin()
        phase("train")

    def on_train_batch_start(self, *_: Any) -> None:
        """Restore the generators before the first batch."""
        self._steps.begin_batch()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Keep the step, and report it; several batches may make one."""
        self._steps.save(trainer.global_step)
        progress(trainer.global_step)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Report an evaluation."""
        phase("eval")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Report its end."""
        phase("train")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Keep no more."""
        self._steps.end()

"""Keep every step of a Hugging Face Trainer.

    from unbroken.worker.integrations.transformers import keep_steps

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=keep_steps(trainer))

A callback reports each step and copies the state of training into memory of the agent. After a
fault, training resumes from there, or from the newest complete checkpoint in `output_dir` if that
is newer. Without an agent of unbroken, only checkpoints are looked for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.worker import checkpoint, context, phase, progress
from unbroken.worker.checkpointing.peers import ALONE, world
from unbroken.worker.checkpointing.state import seed
from unbroken.worker.snapshot.snapshot import Snapshot

from .parts import Late, claim, missing, require, restored_generators

STATE = "trainer_state.json"
"""File that the Trainer writes last, and reads first."""
FOLDER = re.compile(r"checkpoint-(\d{1,18})")
REPLACED = ("_load_from_checkpoint", "_load_rng_state")
"""Methods of the Trainer that would read files of the state that memory has."""
log = Log(__name__, "unbroken.worker: ")


def keep_steps(trainer: Any, name: str = "training") -> str | None:
    """Keep each step from now on; return the `resume_from_checkpoint` of `trainer.train`.

    None: there is nothing to resume from. Call it on every rank, right before `train`. A script
    that trains several times calls it for each, with a `name`.

    A model in shards (FSDP, DeepSpeed) is not copied into memory: its steps are reported, and
    training resumes from checkpoints. Raises SpecError for a Trainer that cannot be resumed.
    """
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise missing("transformers", "transformers[torch]", error) from error
    if not isinstance(trainer, library.Trainer):
        raise SpecError(f"keep_steps takes a transformers.Trainer, not {type(trainer).__name__}")
    steps = _Steps(trainer, claim(name))
    kind = type("KeepSteps", (_Callback, library.TrainerCallback), {})
    trainer.add_callback(kind(steps))
    return steps.resumed()


class _Steps:
    """The steps of one Trainer, kept in memory where that is possible."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer, self._name = trainer, name
        self.optimizer, self.scheduler = Late(), Late()
        self._saved = -1
        self._history = (-1, "")
        self._folder: str | None = None
        self._generators: Any = None
        self.is_resumed_from_memory = False
        self._snapshot = self._made() if context().is_managed else None

    def _made(self) -> Snapshot | None:
        trainer = self.trainer
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            log.warning("steps are not kept in memory: the model is in shards (FSDP or DeepSpeed)")
            return None
        if trainer.model_init is not None:
            raise SpecError("keep_steps: give the Trainer model=, not model_init=")
        require(trainer, REPLACED, "", "transformers")
        return Snapshot(
            model=trainer.model, optimizer=self.optimizer, scheduler=self.scheduler,
            rng=True, extra=self._texts, name=self._name,
        )  # fmt: skip

    def resumed(self) -> str | None:
        """Restore the newest step; return the folder from which the Trainer is to resume."""
        newest = newest_checkpoint(self.trainer.args.output_dir)
        found = None if self._snapshot is None else self._snapshot.restore()
        if found is None or (newest is not None and newest[0] > found.step):
            return None if newest is None else newest[1]
        self.is_resumed_from_memory = True
        self._generators = restored_generators(found)
        state, history = map(json.loads, found.extra)
        self._folder = tempfile.mkdtemp(prefix="unbroken-trainer-")
        Path(self._folder, STATE).write_text(json.dumps({**state, "log_history": history}))
        self.trainer._load_from_checkpoint = self._model_is_loaded
        self.trainer._load_rng_state = self._load_generators
        return self._folder

    def begin(self, optimizer: Any, scheduler: Any) -> None:
        """Give the restored state to the optimizer and the scheduler, which exist now."""
        self.optimizer.bind(optimizer, self.is_resumed_from_memory)
        self.scheduler.bind(scheduler, self.is_resumed_from_memory)
        self._saved = self.trainer.state.global_step
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def save(self, step: int) -> None:
        """Copy the state of training, once for each step."""
        if self._snapshot is not None and step != self._saved:
            self._saved = step
            self._snapshot.save(step)

    def end(self) -> None:
        """Wait for the last copy, and save no more."""
        if self._snapshot is not None:
            self._snapshot.close()

    def _texts(self) -> tuple[str, str]:
        """Return the Trainer's state and its history of logs, which seldom grows, as JSON."""
        state = self.trainer.state
        if self._history[0] != len(state.log_history):
            self._history = (len(state.log_history), json.dumps(state.log_history))
        values = {one.name: getattr(state, one.name) for one in fields(state)}
        values.pop("log_history")
        return json.dumps({**values, "stateful_callbacks": self._callbacks()}), self._history[1]

    def _callbacks(self) -> dict[str, Any]:
        """Return the states of callbacks as the Trainer writes them into its checkpoints."""
        trainer = self.trainer
        kind = import_module("transformers.trainer_callback").ExportableState
        known = [*trainer.callback_handler.callbacks, trainer.control]
        states: dict[str, list[Any]] = {}
        for one in known:
            if isinstance(one, kind):
                states.setdefault(type(one).__name__, []).append(one.state())
        return {name: found if len(found) > 1 else found[0] for name, found in states.items()}

    def _model_is_loaded(self, folder: Any, model: Any = None) -> None:
        """Read no model: `restore` has loaded it."""

    def _load_generators(self, folder: Any) -> None:
        """Continue with the generators of the restored step, as the Trainer does after a resume."""
        if self._generators is not None:
            seed(self._generators)


class _Callback:
    """Events of the Trainer. A step with a log, an evaluation or a checkpoint is kept after it."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        """Restore what the Trainer has made by now."""
        self._steps.begin(optimizer, lr_scheduler)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the step before, if something was due after it."""
        phase("train")
        self._steps.save(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the step, and report it."""
        if not (control.should_log or control.should_evaluate or control.should_save):
            self._steps.save(state.global_step)
        progress(state.global_step)
        if control.should_evaluate:
            phase("eval")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report a checkpoint that is complete."""
        checkpoint(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep no more."""
        self._steps.end()


def newest_checkpoint(output_dir: str) -> tuple[int, str] | None:
    """Return step and path of the newest checkpoint that is complete for every rank.

    The Trainer writes its state last; a folder without it, or with half of it, was interrupted.
    """
    own = tuple(sorted(_complete(Path(output_dir))))
    everyone = (world() or ALONE).gather(own)
    common = set(own).intersection(*everyone)
    if not common:
        return None
    step = max(common)
    return step, os.path.join(output_dir, f"checkpoint-{step}")


def _complete(folder: Path) -> list[int]:
    result = []
    for path in folder.glob("checkpoint-*") if folder.is_dir() else ():
        found = FOLDER.fullmatch(path.name)
        if found is None:
            continue
        try:
            json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            log.warning("checkpoint is not complete, and not used", path=path)
            continue
        result.append(int(found[1]))
    return result

"""Train with Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from records import BATCH, SAVE_STEPS, STEPS, Data, Records, model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

records = Records()


class Watched(Trainer):
    """A Trainer that notes the batch of each step."""

    def training_step(self, trained: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """Note the batch."""
        loss = super().training_step(trained, inputs, *more, **named)
        records.step(self.state.global_step + 1, inputs["input_ids"][0])
        return loss


class Die(TrainerCallback):
    """Dies in the step after the given one."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Die."""
        records.maybe_die(state.global_step)


arguments = TrainingArguments(
    str(records.checkpoints),
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    save_steps=SAVE_STEPS,
    logging_steps=3,
    disable_tqdm=True,
    report_to=[],
    use_cpu=True,
)
trainer = Watched(model=model(), args=arguments, train_dataset=Data())
if records.is_kept:
    from unbroken.worker.integrations.transformers import keep_steps

    resumed = keep_steps(trainer)
else:
    records.checkpoints.mkdir(exist_ok=True)
    resumed = get_last_checkpoint(str(records.checkpoints))
trainer.add_callback(Die())
trainer.train(resume_from_checkpoint=resumed)
records.end(trainer.model)

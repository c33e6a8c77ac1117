"""Train with Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from records import BATCH, SAVE_STEPS, STEPS, Data, Records, model

records = Records()


class Module(LightningModule):
    """The model, with an optimizer and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: Any, index: int) -> Any:
        """Note the batch, and return the loss."""
        records.step(self.global_step + 1, batch["input_ids"][0])
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Die(Callback):
    """Dies in the step after the given one."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Die."""
        records.maybe_die(trainer.global_step)


seed_everything(0)
trainer = Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        ModelCheckpoint(records.checkpoints, every_n_train_steps=SAVE_STEPS, save_last=True),
        Die(),
    ],
)
if records.is_kept:
    from unbroken.worker.integrations.lightning import keep_steps

    keep_steps(trainer)
module = Module()
loader = torch.utils.data.DataLoader(Data(), BATCH, shuffle=True)
trainer.fit(module, loader, ckpt_path=None if records.is_kept else "last")
records.end(module.model)

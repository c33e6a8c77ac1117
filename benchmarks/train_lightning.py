"""A small model under Lightning, with its progress bar."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from framework_steps import made
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    """Random inputs, the same at each start."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Model(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss."""
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters())


class Steps(lightning.Callback):
    """Notes each step of each rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Note the step."""
        made(trainer.global_step)


local = int(os.environ["LOCAL_WORLD_SIZE"])
lightning.Trainer(
    accelerator="cpu",
    devices=local,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local,
    strategy="ddp",
    max_steps=200_000,
    logger=False,
    enable_checkpointing=False,
    callbacks=[Steps()],
).fit(Model(), DataLoader(Numbers(), batch_size=4))

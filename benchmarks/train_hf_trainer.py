"""A small GPT-2 under Hugging Face Trainer, which shows its defaults: a progress bar and losses."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from framework_steps import made
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Random words, the same at each start."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Steps(TrainerCallback):
    """Notes each step of each rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step."""
        made(state.global_step)


sizes = GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=2)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    max_steps=200_000,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    per_device_train_batch_size=4,
)
Trainer(
    model=GPT2LMHeadModel(sizes),
    args=arguments,
    train_dataset=Numbers(),
    callbacks=[Steps()],
).train()

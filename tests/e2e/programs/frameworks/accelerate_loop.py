"""Train in a loop of one's own with Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from records import BATCH, SAVE_STEPS, STEPS, Data, Records, model

records = Records()
seedable = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=seedable)
set_seed(0)
trained = model()
optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
loader = torch.utils.data.DataLoader(Data(), BATCH, shuffle=True)
trained, optimizer, loader, scheduler = accelerator.prepare(trained, optimizer, loader, scheduler)
epochs = STEPS // len(loader)


def keeping() -> None:
    """Train with the adapter."""
    from unbroken.worker.integrations.accelerate import keep_steps

    steps = keep_steps(accelerator)
    for step, batch in steps.of(loader, epochs=epochs):
        records.maybe_die(step - 1)
        train(step, batch)
        steps.save(step)


def saving() -> None:
    """Train with checkpoints of Accelerate's own, as its guide says."""
    records.checkpoints.mkdir(exist_ok=True)
    saved = sorted(records.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))
    done = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name[5:])
    step = done
    for epoch in range(done // len(loader), epochs):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, step - epoch * len(loader))
        for batch in rest:
            records.maybe_die(step)
            step += 1
            train(step, batch)
            if step % SAVE_STEPS == 0:
                accelerator.save_state(str(records.checkpoints / f"step-{step}"))


def train(step: int, batch: dict[str, torch.Tensor]) -> None:
    """Make one step."""
    records.step(step, batch["input_ids"][0])
    optimizer.zero_grad()
    accelerator.backward(trained(**batch).loss)
    optimizer.step()
    scheduler.step()


keeping() if records.is_kept else saving()
records.end(accelerator.unwrap_model(trained))
accelerator.end_training()

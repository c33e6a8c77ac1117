"""A loop with Accelerate, as in its introduction; rank 0 prints a loss each ten steps."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from framework_steps import made
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
while True:
    for given, expected in loader:
        loss = torch.nn.functional.mse_loss(model(given), expected)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
        made(step)

"""A small training run that is the same to the last bit on every machine that is well.

On the processor: one thread, seeded, deterministic algorithms. The same run is made twice; a
machine that disagrees with itself is at fault. The result is reported in a form that
`unbroken.core.nodes.checks.verdict` compares over nodes with the same torch and the same
instructions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from unbroken.kube.clock import monotonic
from unbroken.spec.nodes.kinds import Outcome

from .findings import CheckSettings, Finding, Test, failed, unknown

STEPS = 60
WIDTH, BATCH = 192, 48
RUNS_LEAST = 2


def train(settings: CheckSettings) -> Iterator[Finding]:
    """Train as often as there is time for, at least twice."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield unknown("training-run", f"torch cannot be imported: {error}")
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    planted = settings.plants.number("wrong-weights")
    first = run(planted)
    runs, end = 1, monotonic() + settings.seconds
    while runs < RUNS_LEAST or monotonic() < end:
        again = run(planted)
        runs += 1
        if again != first:
            yield failed(
                "training-run", f"run {runs} gave {again[1]} where the first gave {first[1]}"
            )
            return
    loss, weights = first
    kind = f"torch={torch.__version__} cpu={torch.backends.cpu.get_cpu_capability()}"
    text = f"loss={loss} weights={weights} {kind}"
    yield Finding("training-run", Outcome.PASS, text, runs, None, "equal runs")


def run(planted: int | None = None) -> tuple[str, str]:
    """Loss of the last step as hexadecimal digits, and a digest of the weights."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(20)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(batch), batch.roll(1, 1))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step == planted:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 2.0**-20
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(parameter.detach().contiguous().view(torch.uint8).flatten().tolist()))
    return float(loss.detach()).hex(), digest.hexdigest()[:16]


TESTS = (Test("training-run", train, 240.0),)

"""A byte-level transformer language model, trained on the source of the Python standard library.

It is data parallel over any number of ranks: gloo on CPUs, nccl on GPUs.  Start it with
`unbroken run --nproc-per-node 4 examples/train_lm.py`, or with torchrun.

It can be killed at any moment.  Every few steps, rank 0 writes a checkpoint, which becomes visible
whole or not at all.  A new start resumes from the newest one.  A batch is a function of seed, step
and rank, so the step alone gives the position in the data.

With `--snapshot-every 1` no step is lost either: each rank keeps its state in the agent's memory.
When a rank is killed, the others leave `run` and enter it again in the same process.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

try:
    from unbroken import worker
except ImportError:  # The image has no unbroken, or it runs elsewhere: train without.
    worker = None  # type: ignore[assignment]

VOCABULARY = 256


@dataclass(frozen=True)
class Options:
    """Size of model and training; every field is a command-line option."""

    steps: int = 600
    batch: int = 16
    """Sequences per rank and step."""
    context: int = 64
    width: int = 96
    layers: int = 2
    heads: int = 4
    learning_rate: float = 3e-3
    warmup: int = 20
    seed: int = 0
    print_every: int = 10
    checkpoint_dir: str = ""
    """Folder that all ranks share; without one, a new start begins at step 0."""
    checkpoint_every: int = 25
    snapshot_every: int = 0
    """Steps from one snapshot in memory to the next; 0: none, and a restart takes new processes."""


class Block(nn.Module):
    """Attention, then a feed-forward layer; both normalized at their entry and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.RMSNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: float[batch, time, width]; the same shape comes out."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


class LanguageModel(nn.Module):
    """A GPT over bytes, with learned positions and tied embeddings."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, options.width)
        self.position = nn.Embedding(options.context, options.width)
        blocks = (Block(options.width, options.heads) for _ in range(options.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(options.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64[batch, time].  The mean loss in nats per byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(places)))
        return F.cross_entropy((x @ self.token.weight.T).flatten(0, 1), targets.flatten())


def read_corpus(limit_bytes: int = 8 << 20) -> Tensor:
    """Return the source of the standard library: uint8[bytes], the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text[:limit_bytes]), dtype=torch.uint8)


def read_batch(corpus: Tensor, options: Options, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the token that follows each: int64[batch, context], twice."""
    generator = torch.Generator().manual_seed(hash((options.seed, step, rank)) & (2**63 - 1))
    starts = torch.randint(len(corpus) - options.context, (options.batch,), generator=generator)
    windows = torch.stack([corpus[s : s + options.context + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate(options: Options, step: int) -> float:
    """Return the rate: a linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def save(file: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint to disk; if the process is killed meanwhile, the last one remains."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with (draft := file.with_suffix(".draft")).open("wb") as target:
        torch.save(state, target)
        target.flush()
        os.fsync(target.fileno())
    draft.replace(file)


def load(file: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint; return the next step: 0 without one. RuntimeError if ranks disagree."""
    step, device = 0, next(model.parameters()).device
    if file is not None and file.exists():
        state = torch.load(file, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    bounds = torch.tensor([step, -step], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bounds.sum() != 0:
        raise RuntimeError("ranks would start at different steps: let them share --checkpoint-dir")
    return step


def resume(
    snapshot: worker.Snapshot | None,
    file: Path | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Restore the snapshot, or else the checkpoint; return the next step."""
    found = snapshot.restore() if snapshot else None
    step = found.step + 1 if found else load(file, model, optimizer)
    if dist.get_rank() == 0 and step:
        print(f"resumed at step {step}{f' from {found.source}' if found else ''}", flush=True)
    return step


def train(options: Options, corpus: Tensor, device: torch.device) -> None:
    """Train from the end of the snapshot, or else of the checkpoint, to the last step."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = LanguageModel(options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    file = Path(options.checkpoint_dir) / "checkpoint.pt" if options.checkpoint_dir else None
    snapshot = None
    if worker is not None and options.snapshot_every:
        snapshot = worker.Snapshot(model=model, optimizer=optimizer)
    first_step = resume(snapshot, file, model, optimizer)
    is_equal = worker is not None and worker.replicas_agree(model)
    parallel = DistributedDataParallel(model, init_sync=not is_equal)
    is_gpu = device.type == "cuda"
    known: dict[str, float] = {}
    for step in range(first_step, options.steps):
        tokens, targets = (part.to(device) for part in read_batch(corpus, options, step, rank))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        with torch.autocast("cuda", torch.bfloat16) if is_gpu else nullcontext():
            loss = parallel(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if snapshot and (step + 1) % options.snapshot_every == 0:
            snapshot.save(step)
        if step % options.print_every == 0 or step == options.steps - 1:
            mean = loss.detach()
            dist.all_reduce(mean)
            known["loss"] = mean.item() / dist.get_world_size()
            if rank == 0:
                print(f"step {step} loss {known['loss']:.3f}", flush=True)
        if worker is not None:
            # The newest that is known: fetching each loss would make each step wait for the GPU.
            worker.progress(step, samples=(step + 1) * options.batch, **known)
        if file and rank == 0 and (step + 1) % options.checkpoint_every == 0:
            save(file, step + 1, model, optimizer)
            if worker is not None:
                worker.checkpoint(step)


def parse_options() -> Options:
    """Parse the command line, which is made from the fields of Options."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in asdict(Options()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=" ")
    options = Options(**vars(parser.parse_args()))
    if options.snapshot_every < 0:
        parser.error("--snapshot-every is a number of steps; 0: none")
    return options


def run(options: Options, corpus: Tensor, device: torch.device) -> None:
    """Join the other ranks, train, and leave."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, corpus, device)
    dist.destroy_process_group()


def main() -> None:
    """Prepare the objects that survive the loss of another rank, and run."""
    options = parse_options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_kept = worker is not None and options.snapshot_every
    (worker.restartable(run) if is_kept else run)(options, read_corpus(), device)


if __name__ == "__main__":
    main()

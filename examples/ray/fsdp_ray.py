"""Train a small transformer with Ray Train, Lightning and FSDP, and survive lost nodes and pods.

Submit it to a RayCluster (docs/guide/ray.md):

    ray job submit --address http://localhost:8265 --working-dir examples/ray -- \
        python3 fsdp_ray.py --storage /fsx/runs

The model is sharded over all workers by FSDP2 (`fully_shard`): on GPUs with nccl, on CPUs with
gloo.  Every few steps a checkpoint goes to the storage, which all pods share.  Ray Train starts the
workers again from the newest checkpoint when one is lost.  If the head is lost, submit the same
command again: a run of the same name resumes from its newest checkpoint.  A batch is a function of
seed, step and rank, so that the step alone gives the position in the data.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import ray.train
import ray.train.lightning
import ray.train.torch
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY = 256
CONTEXT = 64
CHECKPOINT = "checkpoint.ckpt"


class Transformer(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64[batch, time].  Scores of the next byte: float[batch, time, 256]."""
        size = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=tokens.device)
        x = self.token(tokens) + self.position(torch.arange(size, device=tokens.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Training(lightning.LightningModule):
    """The model, its batches and its optimizer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.corpus = read_corpus()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Make the model, each layer in shards on all workers."""
        if self.model is not None:
            return
        torch.manual_seed(self.config["seed"])
        model = Transformer(self.config["width"], self.config["layers"])
        mesh = self.device_mesh["data_parallel"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)

    def training_step(self, _batch: Tensor, _number: int) -> Tensor:
        """Return the loss of the batch that belongs to this step."""
        assert self.model is not None
        seed = self.config["seed"], self.global_step, self.global_rank
        generator = torch.Generator().manual_seed(hash(seed) & (2**63 - 1))
        last = len(self.corpus) - CONTEXT
        starts = torch.randint(last, (self.config["batch"],), generator=generator)
        text = torch.stack([self.corpus[s : s + CONTEXT + 1] for s in starts.tolist()])
        text = text.long().to(self.device)
        scores = self.model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the shards of this worker."""
        return torch.optim.AdamW(self.parameters(), lr=self.config["learning_rate"])


class Steps(IterableDataset[int]):
    """Endless numbers: `training_step` makes its own batches."""

    def __iter__(self) -> Iterator[int]:
        """Count without an end; Lightning stops at `max_steps`."""
        return iter(int, 1)


class Shards(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with the devices that Ray gave to the workers."""

    @property
    def root_device(self) -> torch.device:
        """The worker's own device."""
        return ray.train.torch.get_device()


class Report(lightning.Callback):
    """Report the loss, and save a checkpoint for Ray every few steps."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._every = config["checkpoint_every"]
        self._print_every = config["print_every"]
        self._progress = Path(config["storage"]) / f"{config['name']}.log"

    def on_train_start(
        self, trainer: lightning.Trainer, _module: lightning.LightningModule
    ) -> None:
        """Print the step at which a run resumes."""
        if trainer.is_global_zero and trainer.global_step:
            self._tell(f"resumed at step {trainer.global_step}")

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, *_: Any
    ) -> None:
        """Report after a step; all workers do it together."""
        step = trainer.global_step
        loss = float(trainer.callback_metrics["loss"])
        if trainer.is_global_zero and step % self._print_every == 0:
            self._tell(f"step {step} loss {loss:.3f}")
        if step % self._every and step != trainer.max_steps:
            return
        with tempfile.TemporaryDirectory() as folder:
            # The whole state, on rank 0.  For models that do not fit into one worker, let the
            # strategy save shards (`save_distributed_checkpoint=True`), and report on every rank.
            trainer.save_checkpoint(Path(folder) / CHECKPOINT)
            found = None
            if trainer.is_global_zero:
                found = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step, "loss": loss}, checkpoint=found)

    def _tell(self, line: str) -> None:
        """Print a line, and keep it on the storage: the output of a job is lost with the head."""
        print(line, flush=True)
        with self._progress.open("a") as file:
            file.write(f"{line}\n")


def read_corpus(limit_bytes: int = 4 << 20) -> Tensor:
    """Return the source of Python's standard library: uint8[bytes], the same on every worker."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text[:limit_bytes]), dtype=torch.uint8)


def train(config: dict[str, Any]) -> None:
    """Run one worker: train from the newest checkpoint to the last step."""
    trainer = lightning.Trainer(
        max_steps=config["steps"],
        max_epochs=-1,
        accelerator="gpu" if config["use_gpu"] else "cpu",
        devices="auto",
        strategy=Shards(
            data_parallel_size=ray.train.get_context().get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        ),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[Report(config)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Training(config)
    loader = DataLoader(Steps(), batch_size=1)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, loader)
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(module, loader, ckpt_path=Path(folder) / CHECKPOINT)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer with Ray and FSDP.")
    parser.add_argument("--storage", default="/fsx/runs", help="folder that all pods share")
    parser.add_argument("--name", default="fsdp", help="run; the same name resumes it")
    parser.add_argument("--workers", type=int, default=2, help="workers that train together")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--steps", type=int, default=600, help="last step")
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps per checkpoint")
    parser.add_argument("--print-every", type=int, default=10, help="steps per line of output")
    parser.add_argument("--seed", type=int, default=0, help="of model and data")
    return parser.parse_args()


def main() -> None:
    """Train, as the driver of a Ray job."""
    given = options()
    Path(given.storage).mkdir(parents=True, exist_ok=True)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(given),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.use_gpu),
        run_config=ray.train.RunConfig(
            name=given.name,
            storage_path=given.storage,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"finished: {result.metrics}", flush=True)


main()

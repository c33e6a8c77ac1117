"""A Llama-style language model in shards over all ranks (FSDP2), on text from files.

    unbroken run --nproc-per-node 2 examples/fsdp/train.py --max_steps=200 --checkpoint_dir=runs

The options have the names of the training script in HyperPod's documents, so that a manifest made
for that one runs this one. Without options a small model trains on the source of the Python
standard library, byte by byte: gloo on CPUs, nccl and bfloat16 on GPUs. `--dataset` and
`--tokenizer` need the packages `datasets` and `transformers`.

It can be killed at any moment. After every step each rank keeps its shards in the agent's memory,
and `--checkpoint_dir` gets a checkpoint every `--checkpoint_freq` steps. The position in the data
is part of both, so no sample is repeated or skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from time import monotonic  # noqa: TID251  (samples per second)
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as without_activations
from torch.utils.data import DataLoader, IterableDataset

from unbroken import worker

VALIDATION_SAMPLES = 64
MAY_BE_ZERO = ("offload_activations", "max_steps", "warmup", "seed", "data_workers")
"""Whole numbers of Options that may be 0; all others are at least 1."""


@dataclass(frozen=True)
class Options:
    """Size of model and training; every field is a command-line option."""

    model_type: str = "llama_v2"
    hidden_width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_key_value_heads: int = 2
    """Fewer than `num_heads`: several heads share keys and values."""
    intermediate_size: int = 344
    """Width of the feed-forward layers."""
    max_context_width: int = 64
    """Tokens of a sample."""
    offload_activations: int = 1
    """1: the backward pass computes activations again instead of keeping them."""
    sharding_strategy: str = "full"
    """`full`: each parameter is divided among all ranks. `hybrid`: among the ranks of a node, and
    every node has the whole."""
    tokenizer: str = ""
    """Name of a tokenizer on Hugging Face, or its folder. Empty: tokens are bytes."""
    dataset: str = ""
    """Name of a data set on Hugging Face, such as allenai/c4, which is read as a stream. It has
    rows with `text` and the splits `train` and `validation`."""
    dataset_config_name: str = ""
    """The data set's configuration, such as `en`."""
    dataset_path: str = ""
    """Folder with `*.jsonl` files, each line an object with `text`; they are read as a stream.
    Empty: `dataset`, or without one the Python library."""
    train_batch_size: int = 4
    """Samples of a rank in a step."""
    val_batch_size: int = 4
    max_steps: int = 200
    learning_rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 42
    logging_freq: int = 1
    validation_freq: int = 25
    checkpoint_dir: str = ""
    """Folder, or the URL of a store, such as s3://bucket/run. In a folder that each node has for
    itself, only the same ranks find their shards again. Empty: no checkpoints, only the copies in
    memory."""
    checkpoint_freq: int = 50
    resume_from_checkpoint: str = ""
    """The folder to begin from, if it is another one than `checkpoint_dir`."""
    data_workers: int = 0
    """Processes of each rank that read data."""


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of features by its angle. x: [batch, heads, time, size]; angles: [time,
    size / 2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).type_as(x)


class Attention(nn.Module):
    """Causal attention with rotary positions, in which heads may share keys and values."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.size = options.hidden_width // options.num_heads
        self.query = nn.Linear(options.hidden_width, options.num_heads * self.size, bias=False)
        shared = options.num_key_value_heads * self.size
        self.key = nn.Linear(options.hidden_width, shared, bias=False)
        self.value = nn.Linear(options.hidden_width, shared, bias=False)
        self.out = nn.Linear(options.num_heads * self.size, options.hidden_width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x: [batch, time, width]; the same shape comes out."""
        batch, time_, _ = x.shape
        query, key, value = (
            layer(x).view(batch, time_, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(
            rotated(query, angles), rotated(key, angles), value, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a gated feed-forward layer; both normalized at their entry and added."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, inner = options.hidden_width, options.intermediate_size
        self.norm_attention, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(options)
        self.gate, self.up = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x: [batch, time, width]; the same shape comes out."""
        x = x + self.attention(self.norm_attention(x), angles)
        normed = self.norm_feed(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Llama(nn.Module):
    """A language model over `vocabulary` tokens."""

    def __init__(self, options: Options, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, options.hidden_width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = nn.RMSNorm(options.hidden_width)
        self.head = nn.Linear(options.hidden_width, vocabulary, bias=False)
        self.size = options.hidden_width // options.num_heads
        self.is_recomputed = bool(options.offload_activations)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64[batch, time].  The mean loss in nats per token."""
        steps = torch.arange(0, self.size, 2, device=tokens.device) / self.size
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places, 10_000.0**-steps)
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.is_recomputed and self.training:
                x = without_activations(block, x, angles, use_reentrant=False)
            else:
                x = block(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Tokens(NamedTuple):
    """Tokens of a text."""

    count: int
    """Size of the vocabulary."""
    of: Callable[[str], Sequence[int]]
    """Return the tokens of a text, with one that ends it."""


def tokens_of(options: Options) -> Tokens:
    """Return the tokenizer of Hugging Face with this name or in this folder, or else bytes."""
    if not options.tokenizer:
        return Tokens(256, lambda text: text.encode() + b"\n")
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(options.tokenizer)
    except (ImportError, OSError, ValueError) as error:
        refuse("tokenizer", options.tokenizer, error, "--tokenizer=FOLDER, or none for bytes")
    end = [] if found.eos_token_id is None else [found.eos_token_id]
    return Tokens(len(found), lambda text: found.encode(text, add_special_tokens=False) + end)


def refuse(option: str, value: str, error: Exception, instead: str) -> NoReturn:
    """End with what an option needs, and what to give instead of it."""
    package = "transformers" if option == "tokenizer" else "datasets"
    hint = "is there a network or a cache (HF_HOME)?"
    if isinstance(error, ImportError):
        hint = f"pip install {package}"
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise SystemExit(f"--{option}={value}: {reason} ({hint}) Or give {instead}.")


class Samples(IterableDataset[Tensor]):
    """Samples of `width` + 1 tokens, packed from the texts of each shard of a stream."""

    def __init__(self, source: Any, tokens: Tokens, width: int) -> None:
        self.source, self.tokens, self.width = source, tokens, width

    @property
    def num_shards(self) -> int:
        """Number of shards of the stream."""
        return int(self.source.num_shards)

    def shard(self, num_shards: int, index: int) -> Samples:
        """Return the part of the stream that has each `num_shards`-th shard, from `index` on."""
        return Samples(self.source.shard(num_shards, index), self.tokens, self.width)

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.num_shards):
            left: list[int] = []
            for row in self.source.shard(self.num_shards, number):
                left += self.tokens.of(row["text"])
                # The last token of a sample is the first of the next one.
                ends = range(self.width, len(left), self.width)
                for end in ends:
                    yield torch.tensor(left[end - self.width : end + 1], dtype=torch.int32)
                del left[: len(ends) * self.width]


class Files:
    """Texts of files, each of which is a shard: a stream as those of Hugging Face."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return len(self.paths)

    def shard(self, num_shards: int, index: int) -> Files:
        """Return each `num_shards`-th file, from `index` on."""
        return Files(self.paths[index::num_shards])

    def __iter__(self) -> Iterator[dict[str, str]]:
        for path in self.paths:
            for text in texts(path):
                yield {"text": text}


def texts(file: Path) -> Iterator[str]:
    """Yield the texts of a file one by one: of each line of a *.jsonl file, else the whole file."""
    if file.suffix != ".jsonl":
        yield file.read_text(errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{file}:{number}: this is no object with `text`") from None


def named(options: Options) -> tuple[Any, Any]:
    """Return the streams of a data set of Hugging Face: to train on, and to validate."""
    try:
        from datasets import load_dataset

        name, configuration = options.dataset, options.dataset_config_name or None
        found = load_dataset(name, configuration, streaming=True)
    except (ImportError, OSError, ValueError) as error:
        refuse("dataset", options.dataset, error, "--dataset_path=FOLDER with *.jsonl files")
    if not {"train", "validation"} <= found.keys():
        raise SystemExit(f"--dataset={name}: no `train` and `validation`, but {sorted(found)}")
    return found["train"], found["validation"]


def filed(options: Options) -> tuple[Any, Any]:
    """Return the texts of a folder to train on, and those of each 16th file to validate."""
    folder, name = Path(options.dataset_path), "*.jsonl"
    if not options.dataset_path:
        folder, name = Path(sysconfig.get_path("stdlib")), "*.py"
    files = sorted(folder.glob(name))
    if len(files) < 2:
        raise SystemExit(f"--dataset_path={folder}: at least two {name} files are needed")
    trained = [file for number, file in enumerate(files) if number % 16]
    return Files(trained), Files(files[::16])


@dataclass(frozen=True)
class Texts:
    """The data of a rank: to train on, and to validate."""

    vocabulary: int
    stream: Samples
    held: Sequence[Tensor]
    """Samples on which nothing is trained."""


def prepared(options: Options) -> Texts:
    """Open the data set and read the samples that are held out."""
    is_named = options.dataset and not options.dataset_path
    tokens, width = tokens_of(options), options.max_context_width
    train, other = named(options) if is_named else filed(options)
    held = list(islice(Samples(other, tokens, width), VALIDATION_SAMPLES))
    if len(held) < VALIDATION_SAMPLES:
        raise SystemExit(
            f"the data held out for validation make {len(held)} samples of {width} tokens, and "
            f"{VALIDATION_SAMPLES} are needed: give more text, or a smaller --max_context_width"
        )
    return Texts(tokens.count, Samples(train, tokens, width), held)


def mesh_shape(options: Options, ranks: int) -> tuple[int, ...]:
    """Return the size of the mesh: ranks, or with hybrid sharding nodes and ranks of a node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (ranks // local, local) if options.sharding_strategy == "hybrid" else (ranks,)


def sharded(options: Options, vocabulary: int, device: torch.device) -> Llama:
    """Return the model, each block and the rest in shards on the ranks of the mesh."""
    torch.manual_seed(options.seed)
    model = Llama(options, vocabulary).to(device)
    shape = mesh_shape(options, dist.get_world_size())
    mesh = init_device_mesh(
        device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else None
    settings: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": half} if half else {})
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def learning_rate(options: Options, step: int) -> float:
    """Return the rate: a linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.max_steps - options.warmup)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def mean_of_ranks(value: Tensor) -> float:
    """Return the mean over all ranks."""
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def batch_of(samples: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and the token that follows each: int64[batch, width], twice."""
    tokens = samples.to(device).long()
    return tokens[:, :-1], tokens[:, 1:]


def part_of(held: Sequence[Tensor], rank: int, ranks: int) -> Sequence[Tensor]:
    """Return the samples on which a rank validates, as many as on every other rank: each pass of a
    model in shards takes all ranks. Some have the same one if the samples cannot be divided."""
    count = math.ceil(len(held) / ranks)
    return [held[(rank + turn * ranks) % len(held)] for turn in range(count)]


@torch.no_grad()
def validate(model: Llama, batches: Sequence[Tensor], device: torch.device) -> float:
    """Return the mean loss of samples that are not trained on."""
    model.eval()
    losses = [model(*batch_of(batch, device)) for batch in batches]
    model.train()
    return mean_of_ranks(torch.stack(losses).mean())


def is_shared(directory: str, device: torch.device) -> bool:
    """Make a folder; return whether it is the same one for all ranks, by what rank 0 makes there.

    Only a number is sent, as a tensor: lists of objects need NumPy.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    number = torch.tensor(int.from_bytes(os.urandom(7)), device=device)
    is_first = dist.get_rank() == 0
    if is_first:
        (folder / f".seen-{number}").mkdir()
    dist.broadcast(number, 0)
    mark = folder / f".seen-{number}"
    is_seen = torch.tensor(int(mark.is_dir()), device=device)
    dist.all_reduce(is_seen, dist.ReduceOp.MIN)
    if is_first:
        mark.rmdir()
    return bool(is_seen.item())


def say(text: str) -> None:
    """Print a line once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Training:
    """Model, optimizer and data, with all that brings them back."""

    def __init__(self, options: Options, texts: Texts, data: Any, device: torch.device) -> None:
        self.options, self.data, self.device = options, data, device
        self.model = sharded(options, texts.vocabulary, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), options.learning_rate, weight_decay=options.weight_decay
        )
        samples = part_of(texts.held, dist.get_rank(), dist.get_world_size())
        self.validation = torch.split(torch.stack(list(samples)), options.val_batch_size)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "data": data}
        self.completed = -1
        self.saved = None
        if options.checkpoint_dir:
            self.saved = worker.checkpoints(
                options.checkpoint_dir,
                every=options.checkpoint_freq,
                shared="://" in options.checkpoint_dir or is_shared(options.checkpoint_dir, device),
            )
        self.snapshot = worker.Snapshot(**self.parts, checkpoints=self.saved)

    def restore(self) -> int:
        """Return the next step, with the state after the one before it: from memory, or else from
        the newest checkpoint."""
        found: Any = self.snapshot.restore()
        own, other = self.options.checkpoint_dir, self.options.resume_from_checkpoint
        if Path(other).resolve() == Path(own).resolve():
            other = ""
        if found is None and other and ("://" in other or Path(other).is_dir()):
            found = worker.checkpoints(other).restore(**self.parts)
        if found is None:
            return 0
        say(f"resumed at step {found.step + 1} from {getattr(found, 'source', other)}")
        return int(found.step) + 1

    def step(self, step: int, samples: Tensor) -> float:
        """Train on a batch of this rank; return the loss of all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(*batch_of(samples, self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.grad_clip)
        self.optimizer.step()
        return mean_of_ranks(loss)

    def run(self) -> None:
        """Train from what is restored to the last step."""
        options, step, began = self.options, self.restore(), monotonic()
        while step < options.max_steps:
            for samples in self.data:
                epoch, loss = self.data.epoch, self.step(step, samples)
                self.snapshot.save(step)
                worker.progress(step, samples=self.data.samples, loss=loss)
                if (step + 1) % options.logging_freq == 0:
                    now = monotonic()
                    count = options.logging_freq * len(samples) * dist.get_world_size()
                    pace, began = count / (now - began), now
                    told = {"training_loss_step": round(loss, 4), "samples/sec": round(pace, 1)}
                    say(f"[Epoch {epoch} Batch {step}] Loss: {loss:.4f} {told}")
                self.look_up(step)
                step += 1
                if step == options.max_steps:
                    break
        if self.saved is not None:
            self.saved.wait()
            self.say_completed(self.saved.completed)

    def look_up(self, step: int) -> None:
        """Validate and save where it is time for it."""
        if (step + 1) % self.options.validation_freq == 0:
            with worker.phase("eval"):
                loss = validate(self.model, self.validation, self.device)
            say(f"[Batch {step}] Validation loss: {loss:.4f}")
        if self.saved is None:
            return
        if self.saved.is_due(step) and self.saved.save(step, **self.parts):
            say(f"checkpoint of step {step} begun")
        self.say_completed(self.saved.completed)

    def say_completed(self, step: int) -> None:
        """Print a line on the rank that has completed a checkpoint: the last to store its part."""
        if step != self.completed:
            self.completed = step
            print("The checkpoint is finalized. All shards is written.", flush=True)


def parse_options() -> Options:
    """Parse the command line, which is made from the fields of Options."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--OPTION=VALUE ...]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="The class Options in this file says what each option is for.",
    )
    for field in fields(Options):
        default = field.default
        parser.add_argument(f"--{field.name}", type=type(default), default=default, help=" ")
    options = Options(**vars(parser.parse_args()))
    for name, value in vars(options).items():
        least = 0 if name in MAY_BE_ZERO else 1
        if isinstance(value, int) and value < least:
            parser.error(f"--{name}={value}: give a whole number of at least {least}")
    if options.model_type not in ("llama_v2", "llama_v3"):
        parser.error(f"--model_type={options.model_type}: this is a Llama (llama_v2)")
    if options.sharding_strategy not in ("full", "hybrid"):
        parser.error(f"--sharding_strategy={options.sharding_strategy}: give full or hybrid")
    width, heads, shared = options.hidden_width, options.num_heads, options.num_key_value_heads
    if heads % shared or width % (2 * heads):
        parser.error(
            f"--hidden_width={width} --num_heads={heads} --num_key_value_heads={shared}: the width "
            "must be a multiple of 2 * num_heads, and num_heads one of num_key_value_heads"
        )
    return options


def main(options: Options, texts: Texts, data: Any, device: torch.device) -> None:
    """Join the other ranks, train, and leave."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    say(f"Experiment configuration: {options}")
    Training(options, texts, data, device).run()
    dist.destroy_process_group()


def start() -> None:
    """Prepare what outlives the loss of another rank, and train."""
    options, device = parse_options(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    texts, workers = prepared(options), options.data_workers
    loader = DataLoader(
        texts.stream, options.train_batch_size, num_workers=workers, persistent_workers=workers > 0
    )
    # The ranks that are left when one is lost keep their process, and enter `main` again.
    worker.restartable(main)(options, texts, worker.data(loader), device)


if __name__ == "__main__":
    start()

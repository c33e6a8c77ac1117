"""Output of training runs in the formats of real frameworks, healthy or with one fault.

A run has two ranks on one node. Each format defines which rank logs a step, and to which stream. A
fault changes the output from `FAULT_STEP` on. A seeded random cuts the bytes into reads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

STEPS, FAULT_STEP, STEP_SECONDS, START_SECONDS = 60, 30, 1.5, 20.0
STDOUT, STDERR = "stdout", "stderr"


@dataclass(frozen=True)
class Step:
    """One step with the values that a script knows."""

    number: int
    loss: float
    rate: float
    """Samples a second, or TFLOPs, or tokens: the rate that the format shows."""

    @property
    def done(self) -> float:
        return self.number / STEPS


@dataclass(frozen=True)
class Written:
    """Text that one rank writes at a time."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Chunk:
    """Result of one read."""

    at: float
    rank: int
    stream: str
    data: bytes
    is_drained: bool


def bar(step: Step, extra: str = "") -> str:
    """The state of a tqdm bar."""
    full = int(step.done * 10)
    return (
        f"{step.done:4.0%}|{'█' * full}{' ' * (10 - full)}| {step.number}/{STEPS} "
        f"[{step.number * STEP_SECONDS:05.2f}<{(STEPS - step.number) * STEP_SECONDS:05.2f},  "
        f"{STEP_SECONDS:.2f}s/it{extra}]"
    )


def hf_trainer(step: Step) -> Iterator[Written]:
    """transformers.Trainer: a bar on stderr, a dict on stdout every few steps."""
    yield Written(0, STDERR, "\r" + bar(step))
    if step.number % 2 == 0:
        yield Written(
            0,
            STDOUT,
            f"{{'loss': {step.loss:.4f}, 'grad_norm': 1.25, 'learning_rate': 4.9e-05, "
            f"'epoch': {step.done:.2f}, 'train_samples_per_second': {step.rate:.3f}}}\n",
        )


def lightning(step: Step) -> Iterator[Written]:
    """Lightning's TQDMProgressBar; a NaN shows as `nan.0`."""
    loss = "nan.0" if math.isnan(step.loss) else f"{step.loss:.3f}"
    shown = bar(step, f", v_num=0, train_loss={loss}, rate={step.rate:.1f}")
    yield Written(0, STDERR, f"\rEpoch 0: {shown}")


def megatron(step: Step) -> Iterator[Written]:
    """Megatron-LM: the last rank logs."""
    yield Written(
        1,
        STDOUT,
        f" [2025-06-17 05:51:29] iteration {step.number:8d}/{STEPS:8d} | consumed samples: "
        f"{step.number * 128:12d} | elapsed time per iteration (ms): {STEP_SECONDS * 1000:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): {step.rate:.1f} | learning rate: 1.000000E-04 | "
        f"global batch size:   128 | lm loss: {step.loss:.6E} | loss scale: 1.0 | "
        "grad norm: 1.250 | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
    )


def nemo(step: Step) -> Iterator[Written]:
    """NeMo 2's progress printer."""
    yield Written(
        0,
        STDOUT,
        f"Training epoch 0, iteration {step.number}/{STEPS - 1} | lr: 0.0001 | "
        f"global_batch_size: 32 | global_step: {step.number} | reduced_train_loss: "
        f"{step.loss:.4g} | train_step_timing in s: {STEP_SECONDS} | rate: {step.rate:.1f}\n",
    )


def torchtitan(step: Step) -> Iterator[Written]:
    """torchtitan: colours, thousands, percent; every rank logs, on stderr."""
    for rank in (0, 1):
        yield Written(
            rank,
            STDERR,
            f"[titan] 2025-06-17 05:51:29,300 - root - INFO - \x1b[31mstep: {step.number:2}  "
            f"\x1b[32mloss: {step.loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2500  "
            f"\x1b[38;2;54;234;195mmemory:  3.42GiB(7.21%)  \x1b[34mtps: {step.rate * 100:,.0f}  "
            f"\x1b[36mtflops: {step.rate:.2f}  \x1b[35mmfu: {step.rate / 5:.2f}%\x1b[39m\n",
        )


def tqdm_loop(step: Step) -> Iterator[Written]:
    """A hand-written loop with set_postfix and a print among it."""
    yield Written(0, STDERR, f"\r{bar(step, f', loss={step.loss:.3f}, rate={step.rate:.1f}')}")
    if step.number % 10 == 0:
        yield Written(0, STDOUT, f"saved step {step.number}\n")


def deepspeed(step: Step) -> Iterator[Written]:
    """DeepSpeed's engine: `[Rank 0]` inside the line, followed by a timer line."""
    stamp = "[2025-06-17 05:51:29,300] [INFO]"
    yield Written(
        0,
        STDOUT,
        f"{stamp} [logging.py:96:log_dist] [Rank 0] step={step.number}, skipped=0, "
        f"lr=[0.0001], mom=[[0.9, 0.95]], loss={step.loss:.6f}\n"
        f"{stamp} [timer.py:260:stop] epoch=0/micro_step={step.number}/global_step={step.number}, "
        f"RunningAvgSamplesPerSec={step.rate:.4f}, CurrSamplesPerSec={step.rate:.4f}, "
        "MemAllocated=3.42GB, MaxMemAllocated=7.21GB\n",
    )


Format = Callable[[Step], Iterator[Written]]
FORMATS: dict[str, Format] = {
    "hf_trainer": hf_trainer,
    "lightning": lightning,
    "megatron": megatron,
    "nemo": nemo,
    "torchtitan": torchtitan,
    "tqdm": tqdm_loop,
    "deepspeed": deepspeed,
}
COLLECTIVES = {
    "nccl": (
        "[rank1]:[E617 05:51:29.123456789 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600019 milliseconds before timing out.\n"
    ),
    "gloo": (
        "Traceback (most recent call last):\n"
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [127.0.0.1]:25881\n"
    ),
}
"""Text that a rank writes when a collective fails, by backend."""
NOISE = (
    "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n",
    "/usr/lib/python3/torch/utils/checkpoint.py:87: UserWarning: None of the inputs\n",
    "\x1b[33mWARNING\x1b[0m lost packet nan, retrying\r\n",
    "binary \x00\xff\x1b[ garbage \x07\n",
    "\n",
)
OUT_OF_MEMORY = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 12, in <module>\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def step_at(number: int, fault: str | None) -> Step:
    """Return the values of a step under the fault."""
    is_faulty = number >= FAULT_STEP
    loss = 2.5 - number / 100
    if is_faulty and fault in ("nan", "spike"):
        loss = math.nan if fault == "nan" else 9.0
    return Step(number, loss, 60.0 if is_faulty and fault == "slow" else 120.0)


def training(
    form: Format, fault: str | None, seed: int, *, first: int = 0
) -> Iterator[tuple[float, list[Written]]]:
    """Yield times and texts of a run; `fault` is None, hang, nan, spike, slow or oom."""
    chance = random.Random(seed)
    yield 1.0, [Written(rank, STDERR, text) for rank in (0, 1) for text in NOISE]
    for number in range(first, STEPS):
        at = START_SECONDS + number * STEP_SECONDS
        if number == FAULT_STEP and fault == "oom":
            yield at, [Written(1, STDERR, OUT_OF_MEMORY)]
        if number >= FAULT_STEP and fault in ("hang", "oom"):
            return
        written = list(form(step_at(number, fault)))
        if chance.random() < 0.3:
            written.append(Written(1, STDOUT, chance.choice(NOISE)))
        yield at, written


def reads(run: Iterator[tuple[float, list[Written]]], seed: int) -> Iterator[Chunk]:
    """Yield the bytes as an agent reads them: cut anywhere, a little late."""
    chance = random.Random(seed)
    for at, written in run:
        for one in written:
            data = one.text.encode("latin-1" if "\xff" in one.text else "utf-8")
            cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(3)))
            places = [0, *cuts, len(data)]
            for start, end in pairwise(places):
                yield Chunk(at, one.rank, one.stream, data[start:end], end == len(data))

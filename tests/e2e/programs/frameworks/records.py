"""What the programs of this folder share: a tiny data set, records of steps, a kill.

PROGRAM.py FOLDER [--keep] [--kill STEP]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

STEPS = 24
"""Steps of a whole training: two epochs."""
SAVE_STEPS = 5
"""Steps between two checkpoints on disk."""
BATCH = 2
RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("JOB_RESTART_COUNT", "0"))


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens: 12 batches for each of two ranks."""

    def __len__(self) -> int:
        return 12 * 2 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model() -> Any:
    """Make a GPT-2 of two layers, with random weights and dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


class Records:
    """Lines of JSON in a file of each rank; a worker that is killed loses none."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("--keep", action="store_true")
        parser.add_argument("--kill", type=int, default=-1)
        options = parser.parse_args()
        self.folder, self.is_kept, self._kill = options.folder, options.keep, options.kill
        self.checkpoints = self.folder / "checkpoints"

    def step(self, step: int, sample: Any) -> None:
        """Note a step that is made; `sample` is the first sequence of its batch."""
        digest = hashlib.sha256(repr(sample.tolist()).encode()).hexdigest()[:12]
        self._write({"step": step, "sample": digest})

    def maybe_die(self, step: int) -> None:
        """Rank 1 of the first attempt ends by SIGKILL once all ranks have made the given step."""
        if (ATTEMPT, step) == (0, self._kill):
            torch.distributed.barrier()
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def end(self, trained: Any) -> None:
        """Note the digest of the weights, and end the process group.

        torch aborts at exit now and then if a group of gloo is left, and the job runs again.
        """
        digest = hashlib.sha256()
        for tensor in trained.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        self._write({"weights": digest.hexdigest()})
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _write(self, what: dict[str, Any]) -> None:
        with (self.folder / f"rank-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps({"attempt": ATTEMPT, **what}) + "\n")

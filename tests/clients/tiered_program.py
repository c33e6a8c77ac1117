"""A training script with AWS's tiered checkpointing, and the folder of AWS's package.

The script is the user's: it names no address and imports nothing of this project.
"""

from __future__ import annotations

from pathlib import Path

from tests.clients import packages

PACKAGES = (
    *("amzn-sagemaker-checkpointing==1.1.3", "requests==2.34.2", "xxhash==4.1.0"),
    *("s3torchconnector==1.5.0", "s3torchconnectorclient==1.5.0", "boto3==1.44.8"),
    *("botocore==1.44.8", "s3transfer", "jmespath", "python-dateutil", "six", "urllib3==2.8.0"),
    *("certifi", "idna", "charset-normalizer", "tenacity"),
)
"""AWS's package with all that it imports but torch, which is this environment's."""


def installed() -> Path:
    """Return the folder of the package, for PYTHONPATH; the first that asks installs it."""
    return packages.installed("tiered-1.1.3", *PACKAGES)


SCRIPT = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, async_save, load

from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader, SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig,
)

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
notes = open(folder / f"rank-{rank}.jsonl", "a")


def note(**what):
    print(json.dumps({"attempt": attempt, **what}), file=notes, flush=True)


config = SageMakerCheckpointConfig(namespace="llama", world_size=dist.get_world_size())
# 4 MB a rank: each saves what is its own.
state = {f"weights-{rank}": torch.zeros(1_000_000), "step": 0}
reader = SageMakerTieredStorageReader(config)
if reader.read_metadata().state_dict_metadata:
    load(state, storage_reader=SageMakerTieredStorageReader(config))
    weights = state[f"weights-{rank}"]
    assert weights.min() == weights.max() == state["step"], "a mixture of steps"
note(loaded=state["step"])
step = state["step"]
while True:
    is_last = torch.tensor([int((folder / "end").exists())])
    dist.all_reduce(is_last)
    if is_last.item():
        break
    step += 1
    state = {f"weights-{rank}": torch.full((1_000_000,), float(step)), "step": step}
    try:
        writer = SageMakerTieredStorageWriter(config, step=step)
        async_save(state, storage_writer=writer).result()
        note(saved=step)
    # Torch's is no Exception.
    except (Exception, CheckpointException) as error:
        note(failed=step, error=str(error)[:500])
    dist.barrier()
dist.destroy_process_group()
"""

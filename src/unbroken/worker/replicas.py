"""Comparison of the replicas of a model: DDP need not broadcast equal ones."""

from __future__ import annotations

import ctypes
from hashlib import blake2b
from importlib import import_module
from typing import Any
from zlib import crc32

from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import CHUNK_BYTES

from .checkpointing.peers import ALONE, ERROR_CHARACTERS, world

log = Log(__name__, "unbroken.worker: ")


def replicas_agree(model: Any) -> bool:
    """Return whether a module has the same parameters and buffers on all ranks.

    DDP broadcasts the model of rank 0 when it is made, which takes longer than a step if the model
    is large. Replicas that were restored, or made from the same seed, are equal already:

        parallel = DistributedDataParallel(model, init_sync=not worker.replicas_agree(model))

    Call it on all ranks, after `init_process_group`: all get the same answer. Each rank computes
    checksums (CRC-32) of every parameter and buffer, those that no snapshot keeps included, and
    compares them with those of the others, with names, types, shapes and strides. The answer is
    False, and the log has the reason, if a tensor is not in the memory of the CPU, is not dense, or
    cannot be read.
    """
    reason, digest = "", b""
    try:
        digest = _digest(model)
    except Exception as error:  # noqa: BLE001  (told to every rank: the others wait for this one)
        reason = (str(error) or repr(error))[:ERROR_CHARACTERS]
    replicas = (world() or ALONE).gather((digest, reason))
    for rank, (_, reason) in enumerate(replicas):
        if reason:
            log.info("replicas cannot be compared: DDP broadcasts them", rank=rank, reason=reason)
            return False
    return len({digest for digest, _ in replicas}) == 1


def _digest(model: Any) -> bytes:
    """Return a digest of all that DDP would broadcast. Raises ValueError, or errors of torch."""
    result = blake2b(digest_size=16)
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    result.update(repr(sorted(ignored)).encode())
    for name, tensor in model.named_parameters():
        result.update(repr((name, tensor.requires_grad, _content(name, tensor))).encode())
    for name, tensor in model.named_buffers():
        result.update(repr((name, _content(name, tensor))).encode())
    return result.digest()


def _content(name: str, tensor: Any) -> tuple[Any, ...]:
    torch = import_module("torch")

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    if not is_plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise ValueError(f"{name} is a {kind}, not a dense tensor in the memory of the CPU")
    steps = ((size - 1) * stride for size, stride in zip_equal(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + sum(steps) + 1) * tensor.element_size()
    if tensor.numel() and needed > tensor.untyped_storage().nbytes():
        raise ValueError(f"the memory of {name} was freed")
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
    sums = [crc32(memory[at : at + CHUNK_BYTES]) for at in range(0, data.nbytes, CHUNK_BYTES)]
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), sums

"""Find references that keep a destroyed process group of torch alive, with its threads and
connections."""

from __future__ import annotations

import sys

# It is loaded before the user's program, which may have modules of these names.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

C10D = "torch.distributed.distributed_c10d"
KEEPERS = ("torch.distributed.nn.functional", "torch.distributed.fsdp.sharded_grad_scaler",
           "torch.distributed.optim.zero_redundancy_optimizer")  # fmt: skip
"""Modules with `group.WORLD` as a default.

Imported while there is a group, as an optimizer does with the first, they would keep the group and
its connections: its peers would wait (torch 2.6 to 2.13).
"""
CACHES = (
    (
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
    ),
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""Functions that clear torch's caches of operations on DTensors, which FSDP2 and tensor parallelism
use, as far as a version has them.

The caches hold device meshes, and these their groups: a worker that has restarted in process keeps
the groups of all its attempts, and torch aborts it when it ends (torch 2.13).
"""
RELEASE = "unbroken-release"
END_SECONDS = 1.0
"""Seconds for groups at the end of a program."""


def let_go() -> bool:
    """End the threads of groups that were destroyed, at the end of a program; return True if some
    remain: the interpreter must not end then.

    A thread of gloo that releases its last collective while the interpreter ends aborts the
    process. That looks like a failed worker (`terminate called without an active exception`; 3 of
    62 runs of a script of two ranks, torch 2.13). A group that waits for a message of a lost peer
    has such threads until its timeout is over.
    """
    c10d = sys.modules.get(C10D)
    if c10d is None or not hasattr(c10d, "is_initialized") or c10d.is_initialized():
        return False
    unbind(c10d)
    release(_collect)
    import threading
    from time import monotonic  # noqa: TID251  (how long the program has ended)

    until = monotonic() + END_SECONDS
    # Threads of restarts too, which may be releasing groups now.
    releasing = [thread for thread in threading.enumerate() if thread.name == RELEASE]
    for thread in releasing:
        thread.join(max(0.0, until - monotonic()))
    return any(thread.is_alive() for thread in releasing)


def _collect() -> None:
    """Collect garbage: models hold their groups in cycles, and must not hold the last reference
    (`groups._release`)."""
    import gc

    module = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(module, "DistributedDataParallel", ())
    models = (item for item in gc.get_objects() if kind and issubclass(type(item), kind))
    groups = [vars(model).get("process_group") for model in models]
    gc.collect()
    groups.clear()


def release(act: Callable[[], object]) -> threading.Thread:
    """Release groups, in a thread.

    A group waits for its own threads, and a thread of gloo that has lost a message ends with its
    timeout.
    """
    import threading

    thread = threading.Thread(target=act, name=RELEASE, daemon=True)
    thread.start()
    return thread


def unbind(c10d: ModuleType) -> None:
    """Replace groups that are defaults of functions by None, the value of the group at that time,
    and clear caches that hold groups.

    To be called in the thread that trains: each thread has its own caches.
    """
    for module in filter(None, map(sys.modules.get, KEEPERS)):
        for var in vars(module).values():
            _unbind(getattr(var, "__init__", var) if isinstance(var, type) else var, c10d)

    if CACHES[0][0] in sys.modules:
        for name, path in CACHES:
            _clear(sys.modules.get(name), path)


def _clear(found: Any, path: str) -> None:
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is not None:
        found()


def _unbind(function: Any, c10d: ModuleType) -> None:
    given = getattr(function, "__defaults__", None) or ()
    if any(isinstance(item, c10d.ProcessGroup) for item in given):
        kept = (None if isinstance(item, c10d.ProcessGroup) else item for item in given)
        function.__defaults__ = tuple(kept)

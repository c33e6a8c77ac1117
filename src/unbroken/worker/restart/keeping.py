"""Objects that outlive an in-process restart, so that they are not built again.

They come back as a fault left them, in the midst of a step. `Snapshot.restore` rolls them back by a
plain copy. So they are kept only once a snapshot was saved here, and a restore that finds nothing
is an error then. They are also built anew if something of the former attempt could still reach
them: a process group that did not end, the hooks of a DDP model, work of a device after an abort.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from unbroken.errors import SpecError, WorldError
from unbroken.log_lines import Log
from unbroken.worker.channel import attempt_now

from . import doubt, groups

R = TypeVar("R")
GONE_SECONDS = 1.0
"""Time for a group of the former attempt to end; to build a large model takes longer."""
MARK = "unbroken: accumulates for an attempt that is over"
log = Log(__name__, "unbroken.worker: ")


@dataclass
class _Kept:
    value: Any
    attempt: int
    """Attempt that used it last."""
    parameters: list[Any]
    is_saved: bool = False
    """True once a snapshot was saved, by which it can be rolled back."""


@dataclass
class _Process:
    is_on: bool = False
    """True while a restartable function runs that may be called again."""
    kept: dict[str, _Kept] = field(default_factory=dict)
    unrestored: bool = False
    """True if objects were handed out again, and no snapshot was restored since."""


_process = _Process()


def keep(build: Callable[[], R], *, name: str = "training") -> R:
    """Return the result of `build()`; after an in-process restart, the same objects again.

    Call it in a restartable function, before the snapshot of these objects is restored:

        model, optimizer = worker.keep(build)
        snapshot = worker.Snapshot(model=model, optimizer=optimizer)
        found = snapshot.restore()
        parallel = DistributedDataParallel(model, init_sync=found is None)

    A rank that keeps its process then has no model to build and no memory to take. Gradients are
    dropped, and `restore` rolls the rest back: give the snapshot every object that training
    changes. `build` is called in each new process, without a snapshot, and where an object of the
    former attempt still holds what it returned. Each call has a `name` of its own.

    SpecError: the result holds a DDP model or DTensors, which belong to one attempt's groups.
    """
    now, before = attempt_now(), _process.kept.pop(name, None)
    if before is not None and before.attempt == now and _process.is_on:
        raise SpecError(f"keep: {name!r} is kept already in this attempt: give another name=")
    if before is not None and (reason := _refusal(before)):
        log.info("objects are built anew", kept=name, reason=reason)
        before = None
    if before is None:
        value = build()
        before = _Kept(value, now, [*_parameters(name, value)])
    else:
        before.attempt = now
        _process.unrestored = True
        for parameter in before.parameters:
            parameter.grad = None
    if _process.is_on:
        _process.kept[name] = before
    result: R = before.value
    return result


def begin() -> None:
    """Keep objects from now on: a restartable function is about to be called."""
    _process.is_on = True


def end() -> None:
    """Forget all objects: the function is not called again."""
    _process.is_on = _process.unrestored = False
    _process.kept.clear()


def leave() -> None:
    """Prepare for the next attempt: what still accumulates gradients for this one is found then."""
    for kept in _process.kept.values():
        for node in map(_accumulator, kept.parameters):
            if node is not None:
                node.metadata[MARK] = True


def saved() -> None:
    """Note that a snapshot was saved."""
    for kept in _process.kept.values():
        kept.is_saved = True


def restored(is_found: bool) -> None:
    """Note the end of a restore. Raises WorldError if kept objects would stay torn."""
    is_torn = _process.unrestored and not is_found
    _process.unrestored = False
    if is_torn:
        _process.kept.clear()
        raise WorldError(
            "no snapshot can be restored, and objects that worker.keep() has kept are as the "
            "former attempt left them: this rank has to build them again in a new process"
        )


def _refusal(kept: _Kept) -> str:
    """Return why objects cannot be used again; empty: they can."""
    if not kept.is_saved:
        return "no snapshot was saved by which they could be rolled back"
    if doubt.is_doubted(kept.attempt):
        return "a collective was aborted: a device may still change them"
    if not groups.are_gone(GONE_SECONDS) or groups.are_referenced():
        return "a process group of the former attempt has not ended, or something refers to it"
    if any(map(_is_marked, kept.parameters)):
        gc.collect()
        if any(map(_is_marked, kept.parameters)):
            return "a model of the former attempt, such as DDP, still takes their gradients"
    return ""


def _is_marked(parameter: Any) -> bool:
    node = _accumulator(parameter)
    return node is not None and MARK in node.metadata


def _accumulator(parameter: Any) -> Any:
    """Return the node that accumulates the gradient: another one, once nothing holds it.

    None: the parameter has none by now, because it was frozen or never used (a lazy module's).
    """
    torch = import_module("torch")
    if import_module("torch.nn.parameter").is_lazy(parameter):
        return None
    # A fault may have left the thread without gradients (torch.set_grad_enabled).
    with torch.inference_mode(False), torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    return None if function is None else function.next_functions[0][0]


def _parameters(name: str, value: Any) -> Iterator[Any]:
    """Yield the parameters with gradients of all modules. Raises SpecError for those of groups."""
    if "torch" not in sys.modules:
        return
    torch = import_module("torch")
    parallel = import_module("torch.nn.parallel").DistributedDataParallel
    for module in _modules(value, torch.nn.Module):
        for one in module.modules():
            if isinstance(one, parallel):
                raise SpecError(
                    f"keep: {name!r} holds a DDP model, whose process group ends with the "
                    "attempt: return the plain model, and wrap it after keep()"
                )
        for parameter in module.parameters():
            if hasattr(parameter, "device_mesh"):
                raise SpecError(
                    f"keep: {name!r} holds DTensors, whose process group ends with the attempt: "
                    "build a sharded model in each attempt, without keep()"
                )
            if parameter.requires_grad:
                yield parameter


def _modules(value: Any, kind: type) -> Iterator[Any]:
    """Yield the modules in a value: itself, or in tuples, lists, dicts and attributes."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _modules(item, kind)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _modules(item, kind)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            if isinstance(item, kind):
                yield item

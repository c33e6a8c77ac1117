"""The command line of `unbrokenrun`: torchrun's options (torch 2.13) and hyperpodrun's (1.1.3).

Ranks, sizes and addresses come from the operator, so options that only say how torchrun's agents
find each other are taken and have no effect.  What would have an effect there and has none here is
refused with the reason.  As with torchrun, `PET_<OPTION>` in the environment stands in for an
option.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec.warm import PRELOAD_VARIABLE, WARM_VARIABLE, read_preload

EPILOG = "Starts nothing by itself: it waits for an operator that says which ranks to run."


@dataclass(frozen=True, slots=True)
class Script:
    """A program and how to start it."""

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_program: bool = False
    """Start it as it is, without Python."""
    is_run_path: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    script: Script
    nproc: int
    nnodes: int
    host: str = "0.0.0.0"
    port: int = 8080
    run_id: str = "none"
    role: str = "default"
    log_dir: str | None = None
    redirects: str = "0"
    local_ranks: frozenset[int] | None = None
    """Whose output is shown on the console; None: everyone's."""
    stop_signal: int = signal.SIGKILL
    shutdown_timeout_seconds: float = 15.0
    pre_train: Script | None = None
    post_train: Script | None = None
    signals: tuple[int, ...] = ()
    """That end the agent, after its workers have had them."""
    log_level: str = "INFO"
    is_inprocess: bool = False
    """Workers wait for their ranks at the barrier of the agent's socket."""
    inprocess_seconds: float = 60.0
    """For them to come back to it; who does not is started anew."""
    is_warm: bool = True
    """Restarted workers may begin with their imports done."""
    preload: tuple[str, ...] = ()
    """What they begin with; empty: what the first ones imported."""


# Options that torchrun's agents need to find each other, or that tune a loop which is not here.
_WITHOUT_EFFECT = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "max-restarts", "monitor-interval",
    "start-method", "node-rank", "master-addr", "master-port", "local-addr", "tee",
    "server-shutdown-timeout",
)  # fmt: skip
_REFUSED = {
    "standalone": "there is no rendezvous here; run the job with `unbroken run` or torchrun",
    "event-log-handler": "events are recorded by the operator; see `unbroken explain`",
    "duplicate-stdout-filters": "it is not offered; filter the files in --log-dir",
    "duplicate-stderr-filters": "it is not offered; filter the files in --log-dir",
    "logs-specs": "it is not offered; --log-dir holds one file for each rank and stream",
    "numa-binding": "it is not offered; bind in the script or with numactl and --no-python",
    "virtual-local-rank": "it is not offered; read LOCAL_RANK",
}
_FLAGS = ("standalone", "virtual-local-rank")
_HARMLESS = {"event-log-handler": ("null",), "numa-binding": ("", "disabled")}
_SHORT = {"redirects": ("-r",), "tee": ("-t",), "module": ("-m",)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(message)


def _parser(environ: Mapping[str, str]) -> _Parser:
    parser = _Parser(prog="unbrokenrun", allow_abbrev=False, epilog=EPILOG)

    def add(name: str, default: str | None = None, **keywords: Any) -> None:
        both = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        found = environ.get(f"PET_{name.replace('-', '_').upper()}", default)
        parser.add_argument(*_SHORT.get(name, ()), *both, default=found, **keywords)

    def flag(name: str, help_text: str) -> None:
        is_set = environ.get(f"PET_{name.replace('-', '_').upper()}", "0") not in ("0", "")
        both = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(
            *_SHORT.get(name, ()), *both, action="store_true", default=is_set, help=help_text
        )

    add("nnodes", environ.get("NNODES", "1"), help="nodes of the job; the operator decides")
    add(
        "nproc-per-node",
        environ.get("NPROC_PER_NODE", "1"),
        help="workers of this node: a number, auto, gpu or cpu",
    )
    add("rdzv-id", "none", help="names the log directory")
    add("role", "default", help="ROLE_NAME of the workers")
    flag("module", "the script is a module, as with python -m")
    flag("no-python", "the script is a program, started as it is")
    flag("run-path", "run the script with runpy.run_path")
    add("log-dir", help="where the ranks' output is kept; default: $UNBROKEN_LOG_DIR or a new one")
    add("redirects", "0", help="streams that are kept in --log-dir only: 1, 2, 3 or 0:1,1:2")
    add("local-ranks-filter", "", help="local ranks that are shown on the console")
    add("signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", help="signals that end the job here")
    add("shutdown-signal", "SIGKILL", choices=("SIGTERM", "SIGKILL"), help="how workers are ended")
    add("shutdown-timeout", "15", help="seconds from that signal to SIGKILL")
    add("server-host", "0.0.0.0", help="address of the agent's API")
    add("server-port", environ.get("AGENT_PORT", "8080"), help="port of the agent's API")
    add("server-log-level", "info", help="what the agent logs: error, warning, info or debug")
    for stage in ("pre-train", "post-train"):
        add(f"{stage}-script", help=f"a program to run once per node, {stage.partition('-')[0]}")
        add(f"{stage}-args", "", help="its arguments, in one text")
    flag("inprocess-restart", "workers keep their process, and wait at the socket for each start")
    add("inprocess-timeout", "60", help="seconds for them to leave their training at a stop")
    for name in _WITHOUT_EFFECT:
        add(name, help="taken, without effect")
    for name in _REFUSED:
        if name in _FLAGS:
            flag(name, "refused")
        else:
            add(name, help="refused")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _host(asked: str, pod: str) -> str:
    """Where to listen: all addresses of a pod that shares its machine's are the pod's one."""
    return pod if asked in ("0.0.0.0", "::", "") and pod.startswith("127.") else asked


def parse(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Read the command line; SpecError says what is wrong with it."""
    found = _parser(environ).parse_args(arguments)
    for name, reason in _REFUSED.items():
        value = getattr(found, name.replace("-", "_"))
        if value and value not in _HARMLESS.get(name, ()):
            raise SpecError(f"--{name}: {reason}")
    if found.no_python and found.module:
        raise SpecError("--no-python and --module exclude each other")
    script = Script(
        found.training_script,
        tuple(found.training_script_args),
        is_module=found.module,
        is_program=found.no_python,
        is_run_path=found.run_path,
    )
    return Options(
        script=script,
        nproc=workers_per_node(found.nproc_per_node, environ),
        nnodes=_nodes(found.nnodes),
        host=_host(found.server_host, environ.get("AGENT_HOST", "")),
        port=_number("server-port", found.server_port, 0, 65535),
        run_id=_file_name(found.rdzv_id),
        role=found.role,
        log_dir=found.log_dir,
        redirects=_streams("redirects", found.redirects),
        local_ranks=_local_ranks(found.local_ranks_filter),
        stop_signal=signal.Signals[found.shutdown_signal],
        shutdown_timeout_seconds=_number("shutdown-timeout", found.shutdown_timeout, 0, 10**6),
        pre_train=_stage(found.pre_train_script, found.pre_train_args),
        post_train=_stage(found.post_train_script, found.post_train_args),
        signals=_signals(found.signals_to_handle),
        log_level=_level(found.server_log_level),
        is_inprocess=found.inprocess_restart,
        inprocess_seconds=_number("inprocess-timeout", found.inprocess_timeout, 1, 10**6),
        is_warm=_is_on(WARM_VARIABLE, environ),
        preload=read_preload(environ.get(PRELOAD_VARIABLE, "")),
    )


def _is_on(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "on")
    if value not in ("on", "off"):
        raise SpecError(f"{variable}={value} is neither on nor off")
    return value == "on"


def workers_per_node(text: str, environ: Mapping[str, str]) -> int:
    """What `--nproc-per-node` means on this machine; SpecError."""
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise SpecError(
            f"--nproc-per-node {text!r} is neither a number from 1 to 1024 nor auto, gpu or cpu"
        )
    gpus = 0 if text == "cpu" else visible_gpus(environ)
    if text == "gpu" and not gpus:
        raise SpecError("--nproc-per-node gpu: no GPU is visible here")
    return gpus or len(os.sched_getaffinity(0))


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many GPUs workers will see, found without torch."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        # As CUDA reads it: devices up to the first that is not one.
        names = [name.strip() for name in listed.split(",")]
        known = [bool(re.fullmatch(r"\d+|(GPU|MIG)-\S+", name)) for name in names]
        return known.index(False) if False in known else len(known)
    return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def streams_of(selection: str, local_rank: int) -> int:
    """Which streams of a rank a selection like `3` or `0:1,1:2` names: bit 1 stdout, 2 stderr."""
    if ":" not in selection:
        return int(selection)
    pairs = dict(part.split(":") for part in selection.split(","))
    return int(pairs.get(str(local_rank), 0))


def _streams(name: str, text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise SpecError(f"--{name} {text!r} is neither 0, 1, 2 or 3 nor like 0:1,1:2")
    return text


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise SpecError(f"--local-ranks-filter {text!r} is not like 0,1,2")
    return frozenset(int(part) for part in text.split(","))


def _nodes(text: str) -> int:
    least, _, most = text.partition(":")
    if not least.isdecimal() or (most and most != least) or int(least) < 1:
        raise SpecError(
            f"--nnodes {text!r} is not a number; a job's sizes are in its elasticPolicy"
        )
    return int(least)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise SpecError(f"--{name} {text!r} is not a number from {least} to {most}")
    return int(text)


def _signals(text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        found = tuple(signal.Signals[name] for name in names)
    except KeyError as error:
        raise SpecError(f"--signals-to-handle: there is no signal {error.args[0]!r}") from None
    wrong = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} & set(found)
    if wrong:
        raise SpecError(f"--signals-to-handle: {wrong.pop().name} cannot be handled")
    return found


def _stage(path: str | None, arguments: str) -> Script | None:
    if not path:
        return None
    try:
        words = tuple(shlex.split(arguments))
    except ValueError as error:
        raise SpecError(f"arguments of {path}: {error}") from None
    return Script(path, words, is_program=not path.endswith(".py"))


def _level(text: str) -> str:
    level = {"trace": "DEBUG", "critical": "ERROR"}.get(text.lower(), text.upper())
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SpecError(f"--server-log-level {text!r} is not a level")
    return level


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:64] or "none"

"""The command line of `unbrokenrun`, and the table of its options: torchrun's (2.6 to 2.13) and
hyperpodrun's (1.1.3).

The operator assigns ranks, sizes and addresses. Options by which torchrun's agents find each other
have no effect here, and the agent says so. Options that would change the training and are not
supported are refused with the reason. As with torchrun, an option may be abbreviated, and
`PET_<OPTION>` in the environment can replace an option.

Source: `torch/distributed/run.py` in the released packages torch 2.6.0, 2.7.0, 2.8.0, 2.9.0,
2.10.0, 2.11.0, 2.12.0 and 2.13.0.  No release of these removed an option.  `since` is the first of
them that has the option.  `torch/distributed/argparse_util.py` (the environment variables
`PET_<OPTION>`) is the same file in all of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import SpecError
from unbroken.foreign_numbers import whole_number
from unbroken.spec.job.types import PRELOAD_VARIABLE, WARM_VARIABLE, read_preload
from unbroken.spec.problems import unsubstituted

HYPERPOD = "hyperpodrun"
"""Value of `Option.since` for options that only hyperpodrun and this agent have."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option, and what the agent does with it."""

    name: str
    """Name without the leading dashes: `nproc-per-node`."""
    help: str
    short: str = ""
    since: str = "2.6"
    is_flag: bool = False
    kind: Callable[[str], Any] = str
    """Conversion of the value; torchrun refuses what it cannot convert."""
    choices: tuple[str, ...] = ()
    ignored: str = ""
    """Why the option has no effect; empty: it has one."""
    refused: str = ""
    """Why the option is refused; empty: it is not."""
    harmless: tuple[str, ...] = ()
    """Values of a refused option that have no effect."""
    has_variable: bool = True
    """`PET_<OPTION>` in the environment can replace the option."""

    @property
    def dest(self) -> str:
        """Return the attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Return the environment variable that can replace the option."""
        return f"PET_{self.dest.upper()}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all option strings, in the order in which torchrun declares them."""
        both = dict.fromkeys((f"--{self.name}", f"--{self.dest}"))
        return (*((self.short,) if self.short else ()), *both)


_OPERATOR = "the operator assigns ranks and addresses"
_NOT_OFFERED = "not supported by this agent; "

OPTIONS = (  # In torchrun's order, then hyperpodrun's.
    Option("nnodes", "nodes of the job; the operator decides"),
    Option("nproc-per-node", "workers of this node: a number, auto, gpu or cpu"),
    Option("rdzv-backend", "rendezvous backend", ignored=_OPERATOR),
    Option("rdzv-endpoint", "rendezvous address", ignored=_OPERATOR),
    Option("rdzv-id", "names the log directory"),
    Option("rdzv-conf", "rendezvous settings", ignored=_OPERATOR),
    Option(
        "standalone",
        "rendezvous of one node; refused for a job with more nodes",
        is_flag=True,
        ignored=_OPERATOR,
    ),
    Option(
        "max-restarts",
        "restarts before the job fails",
        kind=int,
        ignored="spec.runPolicy.jobMaxRetryCount of the job limits restarts",
    ),
    Option(
        "monitor-interval",
        "seconds between looks at the workers",
        kind=float,
        ignored="the agent is woken when a worker exits",
    ),
    Option(
        "start-method",
        "how workers are started",
        choices=("spawn", "fork", "forkserver"),
        ignored="it concerns Python functions, and workers are programs",
    ),
    Option(
        "event-log-handler",
        "handler of torchrun's events",
        since="2.8",
        refused="the operator records events; see `unbroken explain`",
        harmless=("null",),
    ),
    Option("role", "ROLE_NAME of the workers"),
    Option("module", "the script is a module, as with python -m", short="-m", is_flag=True),
    Option("no-python", "the script is a program, started without Python", is_flag=True),
    Option("run-path", "run the script with runpy.run_path", is_flag=True),
    Option(
        "log-dir",
        "folder for the ranks' whole output; default: $UNBROKEN_LOG_DIR, or a new one that keeps "
        "the last 3 attempts, and of each stream 32 to 64 MiB",
    ),
    Option("redirects", "streams that only --log-dir gets: 1, 2, 3 or 0:1,1:2", short="-r"),
    Option("tee", "streams of --redirects that the console shows too", short="-t"),
    Option("local-ranks-filter", "local ranks whose output the console shows"),
    Option(
        "duplicate-stdout-filters",
        "copies of lines of stdout",
        since="2.10",
        refused=f"{_NOT_OFFERED}filter the files in --log-dir",
    ),
    Option(
        "duplicate-stderr-filters",
        "copies of lines of stderr",
        since="2.10",
        refused=f"{_NOT_OFFERED}filter the files in --log-dir",
    ),
    Option("node-rank", "rank of this node", kind=int, ignored=_OPERATOR),
    Option("master-addr", "address of rank 0", ignored=_OPERATOR),
    Option("master-port", "port of rank 0", kind=int, ignored=_OPERATOR),
    Option("local-addr", "address of this node", ignored=_OPERATOR),
    Option(
        "logs-specs",
        "class that writes the logs",
        refused=f"{_NOT_OFFERED}--log-dir holds one file for each rank and stream",
        harmless=("default",),
        has_variable=False,
    ),
    Option(
        "numa-binding",
        "processors of each worker",
        since="2.9",
        refused=f"{_NOT_OFFERED}bind in the script or with numactl and --no-python",
        harmless=("", "disabled"),
        has_variable=False,
    ),
    Option("signals-to-handle", "signals that end the job here", since="2.10"),
    Option("shutdown-timeout", "seconds from --shutdown-signal to SIGKILL", since="2.12"),
    Option(
        "virtual-local-rank",
        "one visible GPU for each worker",
        since="2.10",
        is_flag=True,
        refused=f"{_NOT_OFFERED}read LOCAL_RANK",
    ),
    Option(
        "shutdown-signal",
        "how workers are ended",
        since=HYPERPOD,
        choices=("SIGTERM", "SIGKILL"),
    ),
    Option("server-host", "address of the agent's API", since=HYPERPOD),
    Option("server-port", "port of the agent's API", since=HYPERPOD),
    Option("server-log-level", "log level: error, warning, info or debug", since=HYPERPOD),
    Option(
        "server-shutdown-timeout",
        "seconds for open requests at the end",
        since=HYPERPOD,
        ignored="the agent closes its API at once",
    ),
    Option("pre-train-script", "a program to run once per node before training", since=HYPERPOD),
    Option("pre-train-args", "its arguments, in one text", since=HYPERPOD),
    Option("post-train-script", "a program to run once per node after training", since=HYPERPOD),
    Option("post-train-args", "its arguments, in one text", since=HYPERPOD),
    Option(
        "inprocess-restart",
        "workers keep their process and wait at the socket for each start",
        since=HYPERPOD,
        is_flag=True,
    ),
    Option("inprocess-timeout", "seconds for workers to leave training at a stop", since=HYPERPOD),
)


NODES_MAX = 100_000
"""Most nodes of a job in the agent's protocol (ranks in the table of addresses)."""
WORKERS_MAX = 1024
"""Most workers of a node."""
ELASTIC_VARIABLE, ELASTIC_OFF = "HYPERPOD_SIGNAL_COORDINATION", "disabled"
"""Environment variable by which a script asks for HyperPod's elastic events, and its default."""
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
class LaunchOptions:
    """Options of the command line."""

    script: Script
    nproc: int
    nnodes: int
    host: str = "0.0.0.0"
    port: int = 8080
    run_id: str = "none"
    role: str = "default"
    log_dir: str | None = None
    redirects: str = "0"
    """Streams that the console does not show, unless `tee` names them too."""
    tee: str = "0"
    local_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown on the console; None: all."""
    stop_signal: int = signal.SIGKILL
    shutdown_timeout_seconds: float = 15.0
    has_elastic_events: bool = False
    """The script asked for SIGUSR1, HyperPod's elastic event."""
    pre_train: Script | None = None
    post_train: Script | None = None
    signals: tuple[int, ...] = ()
    """Signals that end the agent, after its workers have had them."""
    log_level: str = "INFO"
    is_inprocess: bool = False
    """Workers wait for their ranks at the barrier of the agent's socket."""
    inprocess_seconds: float = 60.0
    """Seconds for workers to return to the barrier; a worker that does not is started again."""
    is_warm: bool = True
    """Restarted workers may begin with their imports done."""
    preload: tuple[str, ...] = ()
    """Modules that warm workers begin with; empty: those that the first workers imported."""
    stdin: str = ""
    """Name of the socket that lends standard input (agent/shell); empty: the agent's own."""
    error_file: str = ""
    """File for the error of the worker that failed first, as torchrun writes it for its scheduler;
    empty: none."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about options that were given and have no effect."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(message)


SHELL_VARIABLE = "UNBROKEN_SHELL"
"""Variable with the state of the shell of `unbroken run` (agent/shell)."""


def _defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults of the options that have an effect; the others have none."""
    return {
        "nnodes": environ.get("NNODES", "1"),
        "nproc_per_node": environ.get("NPROC_PER_NODE", "1"),
        "rdzv_id": "none",
        "role": "default",
        "redirects": "0",
        "tee": "0",
        "local_ranks_filter": "",
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "shutdown_signal": "SIGKILL",
        "shutdown_timeout": environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "15"),
        "server_host": "0.0.0.0",
        "server_port": environ.get("AGENT_PORT", "8080"),
        "server_log_level": "info",
        "pre_train_args": "",
        "post_train_args": "",
        "inprocess_timeout": "60",
    }


def _help(option: Option) -> str:
    if option.ignored:
        return f"{option.help}; no effect: {option.ignored}"
    return f"{option.help}; refused: {option.refused}" if option.refused else option.help


def _parser(environ: Mapping[str, str]) -> _Parser:
    """Return the parser. Abbreviations are argparse's own, as in torchrun."""
    parser = _Parser(prog="unbrokenrun", epilog=EPILOG)
    defaults = _defaults(environ)
    for option in OPTIONS:
        result = environ.get(option.variable) if option.has_variable else None
        if option.is_flag:
            default = _flag(option, result or "0")
            parser.add_argument(
                *option.spellings, action="store_true", default=default, help=_help(option)
            )
        else:
            parser.add_argument(
                *option.spellings,
                type=option.kind,
                default=defaults.get(option.dest) if result is None else result,
                choices=option.choices or None,
                help=_help(option),
            )
    parser.add_argument("training_script", help="the script or module that each rank runs")
    parser.add_argument("training_script_args", nargs="*", help="its arguments")
    return parser


def split_after_script(
    arguments: Sequence[str], read: Callable[[Sequence[str]], object]
) -> tuple[Sequence[str], list[str]]:
    """Return the words up to and with the script, and the script's own arguments.

    `read` raises SpecError for words without a script. argparse is never given the words after the
    script: it would refuse those that abbreviate two options. As with torchrun, the first `--` of
    the line is no argument.
    """
    for count in range(1, len(arguments) + 1):
        head, rest = arguments[:count], list(arguments[count:])
        try:
            read(head)
        except SpecError:
            continue
        return head, rest[1:] if rest[:1] == ["--"] and "--" not in head else rest
    return arguments, []


def _flag(option: Option, text: str) -> bool:
    """Return a flag's value in the environment, as torchrun reads it: any number but 0 is on."""
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise SpecError(f"{option.variable}={text[:100]!r} is not a number: write 1 or 0")
    return bool(text.strip("+-0"))


def read_arguments(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Split the command line into options, script and its arguments. Raises SpecError."""
    try:
        parser = _parser(environ)
        head, rest = split_after_script(arguments, parser.parse_known_args)
        found = parser.parse_args(head)
        found.training_script_args += rest
        return found
    except SpecError as error:
        named = [
            option.variable
            for option in OPTIONS
            if option.has_variable and option.variable in environ
        ]
        if not named or str(error).startswith("PET_"):
            raise
        raise SpecError(f"{error} (set in the environment: {', '.join(named)})") from None


def _is_given(found: argparse.Namespace, option: Option) -> bool:
    value = getattr(found, option.dest)
    return value is not None and value is not False


def _is_harmless(found: argparse.Namespace, option: Option) -> bool:
    return getattr(found, option.dest) in option.harmless


def _refuse(found: argparse.Namespace) -> None:
    """Refuse options that would have an effect in torchrun and have none here. Raises SpecError."""
    for option in OPTIONS:
        if option.refused and _is_given(found, option) and not _is_harmless(found, option):
            raise SpecError(f"--{option.name}: {option.refused}")
    if found.no_python and found.module:
        raise SpecError("--no-python and --module exclude each other")
    if found.standalone and node_count(found.nnodes) > 1:
        raise SpecError(
            f"--standalone: each of the {found.nnodes} nodes would train alone; remove it, "
            "or run a job with one node"
        )


def _notes(found: argparse.Namespace) -> tuple[str, ...]:
    """Return sentences about the given options without effect, one for each reason."""
    reasons: dict[str, list[str]] = {}
    for option in OPTIONS:
        if option.ignored and _is_given(found, option):
            reasons.setdefault(option.ignored, []).append(f"--{option.name}")
    return tuple(f"no effect: {', '.join(names)} ({why})" for why, names in reasons.items())


def _host(asked: str, pod: str) -> str:
    """Return the address to listen on: in a pod on its machine's network, all addresses become the
    pod's one."""
    return pod if asked in ("0.0.0.0", "::", "") and pod.startswith("127.") else asked


def parse(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> LaunchOptions:
    """Read the command line. Raises SpecError with the error in it."""
    found = read_arguments(arguments, environ)
    _refuse(found)
    script = Script(
        found.training_script,
        tuple(found.training_script_args),
        is_module=found.module,
        is_program=found.no_python,
        is_run_path=found.run_path,
    )
    return LaunchOptions(
        script=script,
        nproc=workers_per_node(found.nproc_per_node, environ),
        nnodes=node_count(found.nnodes),
        host=_host(found.server_host, environ.get("AGENT_HOST", "")),
        port=_number("server-port", found.server_port, 0, 65535),
        run_id=_file_name(found.rdzv_id),
        role=found.role,
        log_dir=found.log_dir,
        redirects=_streams("redirects", found.redirects),
        tee=_streams("tee", found.tee),
        local_ranks=_local_ranks(found.local_ranks_filter),
        stop_signal=signal.Signals[found.shutdown_signal],
        shutdown_timeout_seconds=_number("shutdown-timeout", found.shutdown_timeout, 0, 10**6),
        has_elastic_events=environ.get(ELASTIC_VARIABLE, ELASTIC_OFF) != ELASTIC_OFF,
        pre_train=_stage(found.pre_train_script, found.pre_train_args),
        post_train=_stage(found.post_train_script, found.post_train_args),
        signals=_signals(found.signals_to_handle),
        log_level=_level(found.server_log_level),
        is_inprocess=found.inprocess_restart,
        inprocess_seconds=_number("inprocess-timeout", found.inprocess_timeout, 1, 10**6),
        is_warm=_is_on(WARM_VARIABLE, environ),
        preload=read_preload(environ.get(PRELOAD_VARIABLE, "")),
        notes=_notes(found),
    )


def torchrun_sizes(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the workers per node and the fewest nodes that torchrun starts for these arguments.
    Raises SpecError."""
    found = read_arguments(arguments, environ)
    nnodes = whole_number(found.nnodes.partition(":")[0], 1, NODES_MAX)
    return workers_per_node(found.nproc_per_node, environ), nnodes or 1


def _is_on(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "on")
    if value not in ("on", "off"):
        raise SpecError(f"{variable}={value} is neither on nor off")
    return value == "on"


def workers_per_node(text: str, environ: Mapping[str, str]) -> int:
    """Return the number of workers that `--nproc-per-node` means on this machine. Raises
    SpecError."""
    if (given := whole_number(text, 1, WORKERS_MAX)) is not None:
        return given
    if text not in ("auto", "gpu", "cpu"):
        raise SpecError(
            f"--nproc-per-node {text!r} is neither a number from 1 to {WORKERS_MAX} nor auto, gpu "
            f"or cpu{unsubstituted(text)}"
        )
    gpus = 0 if text == "cpu" else visible_gpus(environ)
    if text == "gpu" and not gpus:
        raise SpecError("--nproc-per-node gpu: no GPU is visible here")
    return gpus or len(os.sched_getaffinity(0))


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that workers will see, found without torch."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        # CUDA uses the devices up to the first invalid one.
        names = [name.strip() for name in listed.split(",")]
        known = [bool(re.fullmatch(r"\d+|(GPU|MIG)-\S+", name)) for name in names]
        return known.index(False) if False in known else len(known)
    return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def kept_only(options: LaunchOptions, local_rank: int) -> int:
    """Return the streams of a rank that the console does not show: bit 1 stdout, bit 2 stderr."""
    return streams_of(options.redirects, local_rank) & ~streams_of(options.tee, local_rank)


def streams_of(selection: str, local_rank: int) -> int:
    """Return the streams of a rank in a selection like `3` or `0:1,1:2`: bit 1 stdout, 2 stderr."""
    pairs = dict(part.rpartition(":")[::2] for part in selection.split(","))
    return whole_number(pairs.get(str(local_rank), pairs.get("", "0"))) or 0


def _streams(name: str, text: str) -> str:
    if not re.fullmatch(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise SpecError(f"--{name} {text!r} is neither 0, 1, 2 or 3 nor like 0:1,1:2")
    return text


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    given = [whole_number(part, 0, WORKERS_MAX) for part in text.split(",")]
    if None in given:
        raise SpecError(f"--local-ranks-filter {text[:100]!r} is not like 0,1,2")
    return frozenset(one for one in given if one is not None)


def node_count(text: str) -> int:
    """Return the number in `--nnodes N` or `N:N`. Raises SpecError."""
    least, _, most = text.partition(":")
    result = whole_number(least, 1, NODES_MAX)
    if result is None:
        hint = unsubstituted(text)
        raise SpecError(f"--nnodes {text!r} is not a number from 1 to {NODES_MAX}{hint}")
    if most and most != least:
        raise SpecError(
            f"--nnodes {text!r}: elastic jobs are not supported yet (elasticPolicy neither); "
            "write one number"
        )
    return result


def _number(name: str, text: str, least: int, most: int) -> int:
    result = whole_number(text, least, most)
    if result is None:
        hint = unsubstituted(text)
        raise SpecError(f"--{name} {text!r} is not a number from {least} to {most}{hint}")
    return result


def _signals(text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        result = tuple(signal.Signals[name] for name in names)
    except KeyError as error:
        raise SpecError(f"--signals-to-handle: there is no signal {error.args[0]!r}") from None
    wrong = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} & set(result)
    if wrong:
        raise SpecError(f"--signals-to-handle: {wrong.pop().name} cannot be handled")
    return result


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

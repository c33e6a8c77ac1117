"""Table of launch options: torchrun's (torch 2.6 to 2.13) and hyperpodrun's (1.1.3).

Source: `torch/distributed/run.py` in the released packages torch 2.6.0, 2.7.0, 2.8.0, 2.9.0,
2.10.0, 2.11.0, 2.12.0 and 2.13.0.  No release of these removed an option.  `since` is the first of
them that has the option.  `torch/distributed/argparse_util.py` (the environment variables
`PET_<OPTION>`) is the same file in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

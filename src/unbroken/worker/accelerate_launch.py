"""A worker of `accelerate launch OPTIONS SCRIPT ...`: what the options mean for one process.

accelerate computes variables from its options and its configuration file, and its launcher starts
the processes with them. Here the processes exist already: the agent has started this one, with its
rank. So accelerate's own code computes the variables, and the script runs in this process. Options
about processes, machines and rendezvous have no effect.

The worker's interpreter runs this file by path; it needs accelerate and no unbroken.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

LAUNCHERS = ("multi_gpu_launcher", "deepspeed_launcher", "simple_launcher")
"""Functions of `accelerate.commands.launch`, one of which gets the options when they are read."""
OF_AGENT = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
})  # fmt: skip
"""Variables that the agent has set for this worker."""
USAGE_ERROR = 2


def main(words: Sequence[str]) -> None:
    """Run the script that `words`, the arguments of `accelerate launch`, name.

    Raises SystemExit for options that accelerate refuses or that are not supported.
    """
    try:
        launcher, options = _read(words)
        variables = _variables(launcher, options)
    except (ImportError, AttributeError) as error:
        sys.exit(f"accelerate launch: this Python's accelerate cannot be used: {error}")
    except (ValueError, RuntimeError) as error:
        print(f"accelerate launch: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(USAGE_ERROR)
    os.environ.update({k: v for k, v in variables.items() if k not in OF_AGENT})
    _run(options)


def _read(words: Sequence[str]) -> tuple[str, Namespace]:
    """Return the launcher that accelerate chooses, and its options. Raises ValueError."""
    launch = import_module("accelerate.commands.launch")
    options = launch.launch_command_parser().parse_args([*words])
    wanted, world = options.num_processes, int(os.environ["WORLD_SIZE"])
    is_first = os.environ["RANK"] == "0"
    if is_first and wanted not in (None, world):
        text = f"--num_processes {wanted} has no effect: the job has {world}"
        print(f"accelerate launch: {text}", file=sys.stderr)  # noqa: T201
    # It demands two processes of the machine for more than one GPU, which may be on two machines.
    options.num_processes = max(int(os.environ["LOCAL_WORLD_SIZE"]), 2)
    options.num_machines, options.machine_rank = 1, 0
    chosen: list[tuple[str, Namespace]] = []
    for name in LAUNCHERS:
        getattr(launch, name)
        setattr(launch, name, lambda found, name=name: chosen.append((name, found)))
    if not is_first:
        logging.disable(logging.WARNING)  # about defaults, and the same on all ranks
    launch.launch_command(options)
    logging.disable(logging.NOTSET)
    if not chosen:
        raise ValueError("TPUs and SageMaker jobs are not supported here")
    return chosen[0]


def _variables(launcher: str, options: Namespace) -> dict[str, str]:
    """Return the environment that the launcher would give to its processes. Raises ValueError."""
    functions = import_module("accelerate.utils.launch")
    # Its launcher would take this port; 0: one that is free.
    options.main_process_ip, options.main_process_port = None, 0
    result: dict[str, str]
    if launcher == "multi_gpu_launcher":
        result = functions.prepare_multi_gpu_env(options)
        if not import_module("accelerate.utils").check_cuda_p2p_ib_support():
            result = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **result}
    elif launcher == "deepspeed_launcher":
        _, result = functions.prepare_deepspeed_cmd_env(options)
    else:
        _, result = functions.prepare_simple_launcher_cmd_env(options)
    return result


def _run(options: Namespace) -> None:
    """Run the script or module in `__main__`, with its own first entry of `sys.path`."""
    script = options.training_script
    if options.no_python:
        sys.exit("accelerate launch: --no_python is not supported: workers are Python processes")
    own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != own]
    sys.argv = [script, *options.training_script_args]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

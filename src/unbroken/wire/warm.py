"""Messages of the agent to a template process and to the workers parked by it.

Each message is one datagram of a SOCK_SEQPACKET pair: a JSON object with a `type`, and descriptors.
docs/design/fast-recovery.md says how they are used.

| way | type | keys | descriptors |
|---|---|---|---|
| agent to template | import | `modules`, `is_given`, `left_out`, `more` | |
| agent to template | park | | the other end of the parked worker's own pair |
| agent to template | check | | |
| template to agent | found | `left_out`, `files` | |
| template to agent | ready | `modules`, `later`, `skipped`, `seconds` | |
| template to agent | unsafe | `reason` | |
| template to agent | parked | `pid` | |
| template to agent | fresh | | |
| template to agent | stale | `file` | |
| agent to parked | prepare | `environment`, `left_out` | |
| agent to parked | run | `environment`, `directory`, `kind`, `arguments`, `numbers` | one each |
| parked to agent | prepared | `modules`, `left_out` | |
| parked to agent | cold | `reason` | |

`import` comes first, with `more` if another one follows, and later with what else is to be
imported.  `is_given` means that the job named the modules; then any module is admitted. `left_out`
has modules that an earlier template found unfit, with the reasons.

- `import` is answered with `ready` or `unsafe`. `ready` says how many modules were imported, how
  many a parked worker may import (`later`), and which were left out, with why. Unless the job named
  the modules, messages `found` come before it: all modules that are left out, and the state of each
  file that was read (`size:mtime_ns`).
- `park` is answered with `parked` when the worker is a child of the agent and leads its session, or
  with `unsafe`.
- `check` is answered with `fresh`, or with `stale` and a file that has changed since its import.

- `prepare` may come before `run`. `environment` has the variables of the rank that the worker is
  expected to become. The worker imports the modules that were left out because they read such
  variables, or because a fork would lose threads of theirs, but none in `left_out`. It answers with
  `prepared`. If its `left_out` has modules that turned out to be unfit for other reasons, the
  worker has ended.

After `run` a parked worker closes its pair.  If it cannot be what a cold start would be, it says
`cold` before that, and a new interpreter takes its place with the same pid.

End of file on a pair ends who waits on it.
"""

from __future__ import annotations

PER_RANK = (
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "UNBROKEN_PAGE",
)
"""Variables that differ by rank or attempt: a module that reads one while it is imported is not
imported by the template, but by a parked worker."""
PER_ATTEMPT = (
    "MASTER_PORT",
    "JOB_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "UNBROKEN_PAGE",
)
"""Variables of `PER_RANK` that differ in each attempt: a module that reads one while it is imported
is imported by no process but the worker that has started."""
READ = "is read while it is imported"
"""End of the reason of a module that reads a variable of one rank, and of its importers."""
THREADS = "of a library, which a fork would lose"
"""End of the reason of a module whose library starts threads when it is imported, and of its
importers."""
LATER = (READ, THREADS)
"""Ends of the reasons of modules that a parked worker may import: it is forked no more."""
MESSAGE_BYTES_MAX = 160 * 1024
"""Bytes of a message; below what a pair of sockets holds by default (net.core.wmem_default, 208
KiB)."""
SCRIPT, MODULE, RUN_PATH = "script", "module", "run-path"
"""Kinds: `python FILE ARGS`, `python -m NAME ARGS`, and torchrun's `--run-path`."""
LEARNT_VARIABLE = "UNBROKEN_LEARNT"
"""Names the inherited descriptor to which a worker writes its imports, one name per line; removed
from the environment before the script begins."""
IN_PROCESS_VARIABLE = "UNBROKEN_IN_PROCESS"
"""`off` leaves torch in a worker unchanged, also in warm ones; from `unbroken.dev/in-process`."""

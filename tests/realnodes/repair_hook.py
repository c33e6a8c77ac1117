"""Hook of `unbroken operator --node-command`: it reboots machines, or replaces them.

    repair_hook.py ROOM NODE ACTION ORDER_ID

Does an order once, however often it is called, as docs/guide/node-repair.md asks. A replaced
machine's Node is deleted with it, unless the room has the file `keeps-nodes`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.realnodes import machines

KEEPS_NODES = "keeps-nodes"
MARK = "UNBROKEN_REPAIR_CALL"
"""Variable whose holders are killed when the call is over; a machine must outlive it."""


def main(room: Path, node: str, action: str, order_id: str) -> None:
    """Carry out an order, or report again that it was carried out."""
    with open(room / "orders.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = room / "orders"
        done.mkdir(exist_ok=True)
        record = done / order_id.replace("/", "_")
        if not record.exists():
            answer = _carry_out(room, node, action)
            record.write_text(f"{action} {node}\n{answer}")
        sys.stdout.write(record.read_text().partition("\n")[2] + "\n")


def _carry_out(room: Path, node: str, action: str) -> str:
    """Return the answer to an order: the name of the new node, if there is one."""
    if action == "reset-gpu":
        return ""  # machines have no GPUs here; all else stays as it is
    os.environ.pop(MARK, None)
    machines.switch_off(room, node)
    if action != "replace":
        machines.switch_on(room, node, machines.number_of(room, node))
        return ""
    # The machine goes for good, with all that it has kept.
    if not (room / KEEPS_NODES).exists():
        kubectl = ["kubectl", f"--kubeconfig={room / 'kubeconfig'}", "delete", "node", node]
        subprocess.run(kubectl, check=True, stdout=subprocess.DEVNULL)
    number = machines.next_number(room)
    machines.discard(room, node)
    machines.switch_on(room, f"n{number}", number)
    return f"replacement=n{number}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

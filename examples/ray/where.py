"""A Ray job: print the addresses at which tasks ran, one on each node of the cluster."""

from __future__ import annotations

import json
import sys

import ray


@ray.remote(num_cpus=0)  # also on a head that takes no CPUs
def where() -> str:
    """Return the address of the node that this task runs on."""
    return str(ray.util.get_node_ip_address())


def main() -> None:
    """Run a task on each node."""
    ray.init(log_to_driver=False)
    nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    tasks = [where.options(resources={f"node:{one}": 0.01}).remote() for one in nodes]
    sys.stdout.write(f"ran on {json.dumps(sorted(ray.get(tasks)))}\n")


main()

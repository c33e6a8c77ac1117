"""`unbroken status`: the local cluster of a folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import typer

from unbroken.cli.cluster.place import KEY_ID, REGION, SECRET, TOKEN, key_of
from unbroken.cli.connection import NODES, PODS, Cluster, Object, on_cluster
from unbroken.cli.job.views import is_ready
from unbroken.cli.options import Directory, Form, Output
from unbroken.cli.place import DEFAULT, ClusterPlace, resolve
from unbroken.cli.show import note, print_table, size_text
from unbroken.errors import SpecError
from unbroken.local import state

VARIABLES = {"accessKeyId": KEY_ID, "secretAccessKey": SECRET, "sessionToken": TOKEN}
"""Environment variables of the aws CLI."""
NOT_RUNNING = 3
"""Exit status for a stopped cluster, as that of `systemctl status` for a stopped unit."""


def command(directory: Directory = DEFAULT, output: Form = Output.TEXT) -> None:
    """Show a local cluster: its addresses and nodes. Exit status 3: the cluster does not run.

    Example: `unbroken status -o json`
    """
    paths = state.Paths(resolve(directory))
    result = state.running(paths)
    report: dict[str, Any] = {"directory": str(paths.directory), "running": result is not None}
    if result is not None:
        report.update(
            pid=result.pid, url=result.url, kubeconfig=result.kubeconfig, since=result.since
        )
        report.update(clusterApi=result.cluster_api, clusterApiCredentials=_credentials(result))
        report.update(metrics=result.metrics, ui=result.ui)
        report["nodes"] = on_cluster(ClusterPlace(result.kubeconfig), "", _nodes)
    if output.is_data:
        output.print(report)
    else:
        _show(report)
    raise typer.Exit(0 if result is not None else NOT_RUNNING)


def _credentials(found: state.State) -> dict[str, str] | None:
    """The key of the cluster API; None, with a note, if it cannot be read."""
    try:
        key = key_of(found)
    except SpecError as error:
        note(str(error))
        return None
    token = {"sessionToken": key.token} if key.token else {}
    return {"accessKeyId": key.key_id, "secretAccessKey": key.secret, **token}


async def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    pods = [
        pod
        for pod in await cluster.select(PODS, namespace="")
        if (pod.get("status") or {}).get("phase", "Pending") in ("Pending", "Running")
    ]
    return [_node(node, pods) for node in await cluster.select(NODES)]


def _node(node: Object, pods: Iterable[Object]) -> dict[str, Any]:
    name = node["metadata"]["name"]
    capacity = (node.get("status") or {}).get("capacity") or {}
    return {
        "name": name,
        "ready": is_ready(node),
        "pods": sum(1 for pod in pods if pod["spec"].get("nodeName") == name),
        "cpu": capacity.get("cpu"),
        "memory": capacity.get("memory"),
        "gpu": capacity.get("nvidia.com/gpu", "0"),
    }


def _show(report: dict[str, Any]) -> None:
    if not report["running"]:
        print(f"no cluster runs from {report['directory']}; start one with: unbroken up")
        return
    print(f"cluster of {report['directory']} runs (pid {report['pid']}) at {report['url']}")
    print(f"export KUBECONFIG={report['kubeconfig']}")
    print(f"export AWS_ENDPOINT_URL_SAGEMAKER={report['clusterApi']}")
    print(f"export AWS_DEFAULT_REGION={REGION}")
    for name, value in (report["clusterApiCredentials"] or {}).items():
        print(f"export {VARIABLES[name]}={shlex.quote(value)}")
    print(f"metrics: {report['metrics']}")
    if report["ui"]:
        print(f"page: {report['ui']} (unbroken ui prints a link that opens it)")
    rows = [
        (node["name"], ready, node["pods"], node["cpu"], size_text(node["memory"]), node["gpu"])
        for node in report["nodes"]
        for ready in ["yes" if node["ready"] else "no"]
    ]
    print_table(("NODE", "READY", "PODS", "CPU", "MEMORY", "GPU"), rows)

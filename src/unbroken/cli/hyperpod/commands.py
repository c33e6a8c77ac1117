"""`unbroken hyperpod`: the commands of the HyperPod CLI 2.x, on any cluster with PyTorchJobs.

Options and answers are those of aws/sagemaker-hyperpod-cli, branch release_v2.  Consoles need an
AWS account and are left out.
"""

from __future__ import annotations

import shutil
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.app import CONTEXT, App
from unbroken.cli.connection import NODES, PODS, Cluster, Object, ObjectKind
from unbroken.cli.options import ClusterTarget, CommonOptions, Form, Namespace, Output
from unbroken.cli.place import Use
from unbroken.cli.show import note, print_table
from unbroken.errors import SpecError
from unbroken.kube.errors import AlreadyExists
from unbroken.spec.job_kinds import PYTORCHJOB
from unbroken.spec.keys import CLUSTER_NAME, PYTORCHJOB_LABEL, QUEUE
from unbroken.spec.kubeflow.pytorchjob import CONTAINER, KIND, PATH, PLURAL

from .clusters import capacities
from .jobs import StartJobOptions, manifest

JOBS = ObjectKind(
    PATH,
    PLURAL,
    KIND,
    "unbroken hyperpod list-jobs -A",
    f"this cluster knows no {KIND}: Kubeflow's training operator is not installed "
    "(a local cluster has one unless it was started with --no-pytorchjobs)",
)

MAKE_CLUSTER = "make a cluster with: unbroken cluster create"

app = App(
    no_args_is_help=True,
    help="Start and watch PyTorchJobs with the commands of the HyperPod CLI 2.x."
    "\n\nExample: `unbroken hyperpod list-jobs -A`",
)


def run() -> None:
    """Entry point of the program `hyperpod`, equivalent to `unbroken hyperpod`."""
    from unbroken.cli.main import call

    program = App(
        name="hyperpod",
        add_completion=True,
        no_args_is_help=True,
        help=app.info.help,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    program.registered_commands += app.registered_commands
    call(program)


JobOption = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
AsJson = Annotated[
    Output,
    typer.Option("-o", "--output", help="Output format: json (as the HyperPod CLI), yaml or text."),
]


@app.command("start-job")
def start_job(
    config_file: Annotated[
        Path | None,
        typer.Option(help="File that describes the job (config.yaml).", show_default=False),
    ] = None,
    *,
    options: StartJobOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the PyTorchJob; do not create it.")
    ] = False,
    output: Form = Output.TEXT,
    target: ClusterTarget,
) -> None:
    """Start a PyTorchJob from a file, from options, or both; options override the file.

    Example: `unbroken hyperpod start-job --config-file config.yaml --auto-resume true`
    """
    job = manifest(config_file, options)
    if dry_run:
        (output if output.is_data else Output.JSON).print(job)
        return
    _start(job, target, output)


def _start(job: Object, target: ClusterTarget, output: Output) -> None:
    async def act(cluster: Cluster) -> Object:
        return await _create(cluster, job)

    made = target.run(act, namespace=job["metadata"].get("namespace", ""))
    name, inside = made["metadata"]["name"], made["metadata"]["namespace"]
    if output.is_data:
        output.print({"Name": name, "Namespace": inside})
    else:
        print(f"{name}: started in namespace {inside}")


async def _create(cluster: Cluster, job: Object) -> Object:
    try:
        return await cluster.create(JOBS, job)
    except AlreadyExists as refusal:
        name = job["metadata"]["name"]
        text = f'PyTorchJob "{name}" already exists in namespace {cluster.namespace}'
        raise SpecError(text) from refusal


@app.command("get-job")
def get_job(
    job_name: JobOption,
    namespace: Namespace = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show spec and metadata, too.")
    ] = False,
    output: AsJson = Output.JSON,
    *,
    target: ClusterTarget,
) -> None:
    """Show a job and its status.

    Example: `unbroken hyperpod get-job --job-name train`
    """

    async def act(cluster: Cluster) -> Object:
        return await cluster.get(JOBS, job_name)

    job = target.run(act, namespace=namespace)
    if output is Output.TEXT:
        _print_rows([job])
        for item in (job.get("status") or {}).get("conditions") or ():
            print(f"  {item['type']}={item['status']}: {item.get('message', '')}")
        return
    metadata = job["metadata"]
    result = {key: metadata.get(key.lower()) for key in ("Name", "Namespace")}
    result["Label"] = metadata.get("labels")
    if verbose:
        result["Annotations"] = metadata.get("annotations")
        result["Metadata"] = {
            "Creation Timestamp": metadata.get("creationTimestamp"),
            "Generation": metadata.get("generation"),
            "Resource Version": metadata.get("resourceVersion"),
            "UID": metadata.get("uid"),
        }
        result |= {"Kind": job["kind"], "API Version": job["apiVersion"], "Spec": job["spec"]}
    else:
        result["Creation Timestamp"] = metadata.get("creationTimestamp")
    output.print({**result, "Status": job.get("status")})


@app.command("list-jobs")
def list_jobs(
    namespace: Namespace = "",
    every: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List jobs of all namespaces.")
    ] = False,
    selector: Annotated[
        str, typer.Option("-l", "--selector", help="Label selector of the jobs.")
    ] = "",
    output: AsJson = Output.JSON,
    *,
    target: ClusterTarget,
) -> None:
    """List jobs with their states.

    Example: `unbroken hyperpod list-jobs -A -o text`
    """

    async def act(cluster: Cluster) -> list[Object]:
        return await cluster.select(JOBS, selector, "" if every else cluster.namespace)

    jobs = target.run(act, namespace=namespace)
    if output.is_data:
        output.print({"jobs": [_summary(job) for job in jobs]})
    elif jobs:
        _print_rows(jobs)
    else:
        note("no PyTorchJobs; start one with: unbroken hyperpod start-job")


@app.command("get-clusters")
def get_clusters(
    clusters: Annotated[
        str,
        typer.Option(help="Names of clusters, separated by commas.", show_default="all clusters"),
    ] = "",
    output: AsJson = Output.JSON,
    *,
    target: ClusterTarget,
) -> None:
    """Show nodes, free accelerators and health of each cluster of machines, by instance type.

    Example: `unbroken hyperpod get-clusters -o text`
    """
    names = frozenset(filter(None, (name.strip() for name in clusters.split(","))))

    async def act(cluster: Cluster) -> list[dict[str, Any]]:
        pods = await cluster.select(PODS, namespace="")
        return capacities(await cluster.select(NODES), pods, names)

    rows = target.run(act)
    if output.is_data:
        output.print(rows)
    elif rows:
        print_table(list(rows[0]), [list(one.values()) for one in rows])
    if not rows:
        wanted = f" of {', '.join(sorted(names))}" if names else ""
        note(f"no nodes of clusters{wanted}; {MAKE_CLUSTER}")


@app.command("connect-cluster")
def connect_cluster(
    cluster_name: Annotated[str, typer.Option(help="Name of the cluster of machines.")],
    region: Annotated[str, typer.Option(help="Has no effect: there are no regions.")] = "",
    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="Refused: each command has its own option.")
    ] = "",
    *,
    target: ClusterTarget,
) -> None:
    """Check that commands reach a cluster of machines; it has nothing else to connect.

    Example: `unbroken hyperpod connect-cluster --cluster-name ml-cluster`
    """
    if namespace:
        raise SpecError(
            f"--namespace {namespace} is not kept: give it to each command, or run: kubectl config "
            f"set-context --current --namespace={namespace}"
        )

    async def act(cluster: Cluster) -> set[str]:
        nodes = await cluster.select(NODES)
        return {(node["metadata"].get("labels") or {}).get(CLUSTER_NAME, "") for node in nodes}

    names = target.run(act) - {""}
    if cluster_name not in names:
        known = f"it has: {', '.join(sorted(names))}" if names else MAKE_CLUSTER
        raise SpecError(f"no node belongs to a cluster {cluster_name}; {known}")
    if region:
        note(f"--region {region} has no effect: the kubeconfig names the cluster")
    print(f"{cluster_name}: commands reach this cluster")


@app.command("cancel-job")
def cancel_job(job_name: JobOption, options: CommonOptions) -> None:
    """Delete a job with its pods.

    Example: `unbroken hyperpod cancel-job --job-name train`
    """

    async def act(cluster: Cluster) -> None:
        await cluster.get(JOBS, job_name)
        await cluster.delete(JOBS, job_name)

    options.run(act, Use.CHANGE)
    if options.output.is_data:
        options.output.print({"Name": job_name, "done": "cancelled"})
    else:
        print(f"{job_name}: cancelled")


@app.command("list-pods")
def list_pods(
    job_name: JobOption,
    namespace: Namespace = "",
    output: AsJson = Output.JSON,
    *,
    target: ClusterTarget,
) -> None:
    """List the pods of a job.

    Example: `unbroken hyperpod list-pods --job-name train`
    """

    async def act(cluster: Cluster) -> list[Object]:
        await cluster.get(JOBS, job_name)
        return await cluster.select(PODS, f"{PYTORCHJOB_LABEL}={job_name}")

    result = target.run(act, namespace=namespace)
    pods = [_pod(item) for item in sorted(result, key=lambda item: str(item["metadata"]["name"]))]
    if output.is_data:
        output.print({"pods": pods})
    else:
        print_table(["POD", "STATUS", "CREATED"], [_cells(pod) for pod in pods])


def _pod(pod: Object) -> dict[str, Any]:
    metadata = pod["metadata"]
    return {
        "Pod Name": metadata["name"],
        "Namespace": metadata["namespace"],
        "Status": (pod.get("status") or {}).get("phase"),
        "Creation Time": metadata.get("creationTimestamp"),
    }


def _cells(pod: dict[str, Any]) -> list[object]:
    return [pod["Pod Name"], pod["Status"], pod["Creation Time"]]


@app.command("get-log")
def get_log(
    job_name: JobOption,
    pod: Annotated[str, typer.Option("-p", "--pod", help="Name of the pod.")],
    options: CommonOptions,
) -> None:
    """Print the log of a pod of a job.

    Example: `unbroken hyperpod get-log --job-name train --pod train-worker-0`
    """

    async def act(cluster: Cluster) -> list[str]:
        await _pods_of(cluster, job_name, pod or None)
        lines = cluster.client.text_lines(
            f"{cluster.path(PODS, pod)}/log", {"container": CONTAINER}
        )
        return [line async for line in lines]

    lines = options.run(act)
    if options.output.is_data:
        options.output.print({"Pod Name": pod, "lines": lines})
    else:
        for line in lines:
            print(line)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_command(
    job_name: JobOption,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Command line for bash.")
    ],
    pod: Annotated[str, typer.Option("-p", "--pod", help="Name of the pod.")] = "",
    every: Annotated[
        bool, typer.Option("--all-pods", help="Run the command in all pods of the job.")
    ] = False,
    namespace: Namespace = "",
    *,
    target: ClusterTarget,
) -> None:
    """Run a command line with bash in one pod or in all pods of a job; needs kubectl.

    The exit code is that of the first pod in which it fails.

    Example: `unbroken hyperpod exec --job-name train --all-pods -- nvidia-smi -L`
    """
    if bool(pod) is every:
        raise SpecError("give one of --pod POD and --all-pods")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise SpecError("exec needs kubectl, and there is none on the PATH")

    async def act(cluster: Cluster) -> tuple[str, list[str], list[str]]:
        place, pods = cluster.place, await _pods_of(cluster, job_name, pod or None)
        options = {"kubeconfig": place.kubeconfig, "context": place.context}
        words = [f"--{name}={value}" for name, value in options.items() if value]
        return cluster.namespace, words, pods

    inside, words, pods = target.run(act, Use.CHANGE, namespace)
    failed = 0
    for name in pods:
        if every:
            print(name, flush=True)
        chosen = [*words, "-n", inside, "exec", name, "-c", CONTAINER]
        line = [kubectl, *chosen, "--", "/bin/bash", "-c", " ".join(command)]
        failed = failed or subprocess.run(line, check=False).returncode
    if failed:
        raise typer.Exit(failed)


async def _pods_of(cluster: Cluster, job_name: str, pod: str | None) -> list[str]:
    """Names of the pods of a job; with `pod` of this one alone; SpecError if there is none."""
    await cluster.get(JOBS, job_name)
    pods = await cluster.select(PODS, f"{PYTORCHJOB_LABEL}={job_name}")
    names = sorted(str(item["metadata"]["name"]) for item in pods)
    if pod is not None and pod not in names:
        raise SpecError(f"job {job_name} has no pod {pod}; it has: {', '.join(names) or 'none'}")
    if not names:
        raise SpecError(f"job {job_name} has no pods")
    return names if pod is None else [pod]


class PatchType(StrEnum):
    """Changes that `patch-job` makes."""

    SUSPEND = "suspend"
    UNSUSPEND = "unsuspend"


@app.command("patch-job")
def patch_job(
    patch_type: Annotated[PatchType, typer.Argument(help="Change to make.")],
    job_name: JobOption,
    namespace: Namespace = "",
    *,
    target: ClusterTarget,
) -> None:
    """Suspend a job, which deletes its pods, or let it run again.

    Example: `unbroken hyperpod patch-job suspend --job-name train`
    """
    is_suspended = patch_type is PatchType.SUSPEND

    async def act(cluster: Cluster) -> None:
        job = await cluster.get(JOBS, job_name)
        if queue := (job["metadata"].get("labels") or {}).get(QUEUE):
            active = "false" if is_suspended else "true"
            raise SpecError(
                f"job {job_name} is in the queue {queue}, and Kueue decides when it runs: set "
                f"spec.active of its Workload to {active} instead (kubectl -n {cluster.namespace} "
                "get workloads)"
            )
        await cluster.patch(JOBS, job_name, PYTORCHJOB.suspension(is_suspended))

    target.run(act, Use.CHANGE, namespace)
    print(f"{job_name}: {patch_type.value}ed")


def _summary(job: Object) -> dict[str, Any]:
    status = job.get("status") or {}
    true = [item["type"] for item in status.get("conditions") or () if item["status"] == "True"]
    return {
        "Name": job["metadata"]["name"],
        "Namespace": job["metadata"]["namespace"],
        "Creation Time": status.get("startTime"),
        "State": true[-1] if true else None,
    }


def _print_rows(jobs: list[Object]) -> None:
    rows = []
    for job in jobs:
        item = _summary(job)
        rows.append([item["Namespace"], item["Name"], item["State"] or "-", item["Creation Time"]])
    print_table(["NAMESPACE", "NAME", "STATE", "STARTED"], rows)

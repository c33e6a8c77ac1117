"""`unbroken hyperpod`: the commands of the HyperPod CLI 2.x, on any cluster with PyTorchJobs.

Options and answers are those of aws/sagemaker-hyperpod-cli, branch release_v2.  Commands that need
an AWS account (connecting, capacity, consoles) are left out.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.app import App
from unbroken.cli.connection import PODS, Cluster, Collection, Object
from unbroken.cli.options import CommonOptions, Form, Namespace, Output, Target
from unbroken.cli.place import Use
from unbroken.cli.show import note, print_json, print_table
from unbroken.errors import SpecError
from unbroken.kube.errors import AlreadyExists
from unbroken.spec.keys import PYTORCHJOB_LABEL
from unbroken.spec.kubeflow.pytorchjob import CONTAINER, KIND, PATH, PLURAL

from .jobs import Options, manifest

JOBS = Collection(
    PATH,
    PLURAL,
    KIND,
    "unbroken hyperpod list-jobs -A",
    f"this cluster knows no {KIND}: Kubeflow's training operator is not installed "
    "(a local cluster has one unless it was started with --no-pytorchjobs)",
)

app = App(
    add_completion=False,
    no_args_is_help=True,
    help="Start and watch PyTorchJobs with the commands of the HyperPod CLI 2.x.",
)


def run() -> None:
    """Entry point of the program `hyperpod`, equivalent to `unbroken hyperpod`."""
    from unbroken.cli.main import call

    program = typer.Typer(
        name="hyperpod",
        no_args_is_help=True,
        help=app.info.help,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.registered_commands += app.registered_commands
    call(program)


class Answer(StrEnum):
    """`true` and `false`: the CLI has no flags for them."""

    TRUE = "true"
    FALSE = "false"


JobOption = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
AsJson = Annotated[
    Output,
    typer.Option("-o", "--output", help="Form of the answer: json, as the CLI prints, or text."),
]


ConfigFile = Annotated[
    Path | None, typer.Option(help="File that describes the job (config.yaml).", show_default=False)
]
Image = Annotated[str, typer.Option(help="Image of the job's containers.")]
Script = Annotated[str, typer.Option(help="Training script.")]
Arguments = Annotated[str, typer.Option(help="Arguments of the script.")]
NodeCount = Annotated[int | None, typer.Option(min=1, help="Number of nodes.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Number of processes on each node.")]
InstanceType = Annotated[
    str, typer.Option(help="Instance type of the nodes, such as ml.p5.48xlarge.")
]
Variables = Annotated[
    str, typer.Option(metavar="KEY=VALUE,...", help="Environment variables, also as JSON.")
]
PullPolicy = Annotated[
    str, typer.Option(help="Pull policy of the image: Always, IfNotPresent or Never.")
]
Restart = Annotated[
    str, typer.Option(help="Restart policy of the pods: OnFailure, Always, Never or ExitCode.")
]
AutoResume = Annotated[
    Answer | None,
    typer.Option(
        case_sensitive=False,
        help="Restart the job when it loses a node.",
        show_default=False,
    ),
]
MaxRetry = Annotated[
    int | None, typer.Option(min=0, help="Maximum number of these restarts.", show_default="1")
]
Labels = Annotated[str, typer.Option(help="Labels that the job's nodes must have, as JSON.")]
Checked = Annotated[
    Answer, typer.Option(case_sensitive=False, help="Use only nodes that passed their deep check.")
]
Queue = Annotated[str, typer.Option(help="Queue of Kueue.")]
Priority = Annotated[str, typer.Option(help="Priority class; needs --queue-name.")]
Account = Annotated[str, typer.Option(help="Service account of the pods.")]
Claims = Annotated[
    str, typer.Option(metavar="CLAIM:/PATH,...", help="Volume claims to mount, and where.")
]
Volumes = Annotated[
    str,
    typer.Option(metavar="NAME:/HOST:/PATH,...", help="Folders of the nodes to mount, and where."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the PyTorchJob; do not create it.")]

PLACES = {
    "job_name": "training_cfg.run.name",
    "node_count": "training_cfg.run.nodes",
    "tasks_per_node": "training_cfg.run.ntasks_per_node",
    "entry_script": "training_cfg.entry_script",
    "script_args": "training_cfg.script_args",
    "image": "container",
    "instance_type": "cluster.instance_type",
    "namespace": "cluster.cluster_config.namespace",
    "pull_policy": "cluster.cluster_config.pullPolicy",
    "restart_policy": "cluster.cluster_config.restartPolicy",
    "priority": "cluster.cluster_config.priority_class_name",
    "service_account_name": "cluster.cluster_config.service_account_name",
}
"""Keys of the file that options set, by parameter name."""


@app.command("start-job")
def start_job(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    job_name: Annotated[str, typer.Option(help="Name of the job.")] = "",
    namespace: Namespace = "",
    image: Image = "",
    entry_script: Script = "",
    script_args: Arguments = "",
    node_count: NodeCount = None,
    tasks_per_node: Tasks = None,
    instance_type: InstanceType = "",
    environment: Variables = "",
    pull_policy: PullPolicy = "",
    restart_policy: Restart = "",
    auto_resume: AutoResume = None,
    max_retry: MaxRetry = None,
    label_selector: Labels = "",
    deep_health_check_passed_nodes_only: Checked = Answer.FALSE,
    queue_name: Queue = "",
    priority: Priority = "",
    service_account_name: Account = "",
    persistent_volume_claims: Claims = "",
    volumes: Volumes = "",
    dry_run: DryRun = False,
    output: Form = Output.TEXT,
    *,
    target: Target,
) -> None:
    """Start a PyTorchJob from a file, from options, or both; options override the file.

    `unbroken hyperpod start-job --config-file ./config.yaml --auto-resume true --max-retry 2`
    """
    options = Options(
        values={place: ctx.params[name] for name, place in PLACES.items()},
        environment=environment,
        label_selector=label_selector,
        is_checked_only=deep_health_check_passed_nodes_only is Answer.TRUE,
        queue_name=queue_name,
        claims=persistent_volume_claims,
        volumes=volumes,
        auto_resume=None if auto_resume is None else auto_resume is Answer.TRUE,
        max_retry=max_retry,
    )
    job = manifest(config_file, options)
    if dry_run:
        print_json(job)
        return
    _start(job, target, output)


def _start(job: Object, target: Target, output: Output) -> None:
    async def act(cluster: Cluster) -> Object:
        return await _create(cluster, job)

    made = target.run(act, namespace=job["metadata"].get("namespace", ""))
    name, inside = made["metadata"]["name"], made["metadata"]["namespace"]
    if output is Output.JSON:
        print_json({"Name": name, "Namespace": inside})
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
    target: Target,
) -> None:
    """Show a job and its status."""

    async def act(cluster: Cluster) -> Object:
        return await cluster.get(JOBS, job_name)

    job = target.run(act, namespace=namespace)
    if output is Output.TEXT:
        _print_rows([job])
        for one in (job.get("status") or {}).get("conditions") or ():
            print(f"  {one['type']}={one['status']}: {one.get('message', '')}")
        return
    metadata = job["metadata"]
    found = {key: metadata.get(key.lower()) for key in ("Name", "Namespace")}
    found["Label"] = metadata.get("labels")
    if verbose:
        found["Annotations"] = metadata.get("annotations")
        found["Metadata"] = {
            "Creation Timestamp": metadata.get("creationTimestamp"),
            "Generation": metadata.get("generation"),
            "Resource Version": metadata.get("resourceVersion"),
            "UID": metadata.get("uid"),
        }
        found |= {"Kind": job["kind"], "API Version": job["apiVersion"], "Spec": job["spec"]}
    else:
        found["Creation Timestamp"] = metadata.get("creationTimestamp")
    print_json({**found, "Status": job.get("status")})


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
    target: Target,
) -> None:
    """List jobs with their states."""

    async def act(cluster: Cluster) -> list[Object]:
        return await cluster.select(JOBS, selector, "" if every else cluster.namespace)

    jobs = target.run(act, namespace=namespace)
    if output is Output.JSON:
        print_json({"jobs": [_summary(job) for job in jobs]})
    elif jobs:
        _print_rows(jobs)
    else:
        note("no PyTorchJobs; start one with: unbroken hyperpod start-job")


@app.command("cancel-job")
def cancel_job(job_name: JobOption, options: CommonOptions) -> None:
    """Delete a job with its pods."""

    async def act(cluster: Cluster) -> None:
        await cluster.get(JOBS, job_name)
        await cluster.delete(JOBS, job_name)

    options.run(act, Use.CHANGE)
    if options.is_json:
        print_json({"Name": job_name, "done": "cancelled"})
    else:
        print(f"{job_name}: cancelled")


@app.command("list-pods")
def list_pods(
    job_name: JobOption, namespace: Namespace = "", output: AsJson = Output.JSON, *, target: Target
) -> None:
    """List the pods of a job."""

    async def act(cluster: Cluster) -> list[Object]:
        await cluster.get(JOBS, job_name)
        return await cluster.select(PODS, f"{PYTORCHJOB_LABEL}={job_name}")

    found = target.run(act, namespace=namespace)
    pods = [_pod(one) for one in sorted(found, key=lambda one: str(one["metadata"]["name"]))]
    if output is Output.JSON:
        print_json({"pods": pods})
    else:
        print_table(["POD", "STATUS", "CREATED"], [_cells(one) for one in pods])


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
    """Print the log of a pod of a job."""

    async def act(cluster: Cluster) -> list[str]:
        await cluster.get(JOBS, job_name)
        pods = await cluster.select(PODS, f"{PYTORCHJOB_LABEL}={job_name}")
        names = sorted(str(one["metadata"]["name"]) for one in pods)
        if pod not in names:
            listed = ", ".join(names) or "none"
            raise SpecError(f"job {job_name} has no pod {pod}; it has: {listed}")
        lines = cluster.client.text_lines(
            f"{cluster.path(PODS, pod)}/log", {"container": CONTAINER}
        )
        return [line async for line in lines]

    lines = options.run(act)
    if options.is_json:
        print_json({"Pod Name": pod, "lines": lines})
    else:
        for line in lines:
            print(line)


def _summary(job: Object) -> dict[str, Any]:
    status = job.get("status") or {}
    true = [one["type"] for one in status.get("conditions") or () if one["status"] == "True"]
    return {
        "Name": job["metadata"]["name"],
        "Namespace": job["metadata"]["namespace"],
        "Creation Time": status.get("startTime"),
        "State": true[-1] if true else None,
    }


def _print_rows(jobs: list[Object]) -> None:
    rows = []
    for job in jobs:
        one = _summary(job)
        rows.append([one["Namespace"], one["Name"], one["State"] or "-", one["Creation Time"]])
    print_table(["NAMESPACE", "NAME", "STATE", "STARTED"], rows)

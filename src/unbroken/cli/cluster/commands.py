"""`unbroken cluster`: clusters of machines, through the cluster API.

Rows and lines that it shows are pure functions of the API's answers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from unbroken.cli.app import App
from unbroken.cli.documents import read_text
from unbroken.cli.listing import Listing, show_list
from unbroken.cli.options import Context, Form, ListForm, ListOutput, LocalDirectory, Output
from unbroken.cli.show import note, print_table
from unbroken.errors import SpecError
from unbroken.spec.times import time_text

from .place import EndpointUrl, endpoint

if TYPE_CHECKING:
    from unbroken.cluster_api.client import Client


ObjectView = Mapping[str, Any]
CLUSTER_TITLES = ("NAME", "STATUS", "CREATED", "ARN")
GROUP_TITLES = ("GROUP", "TYPE", "STATUS", "CURRENT", "TARGET", "CHECKS")


def cluster_row(summary: ObjectView) -> tuple[str, ...]:
    """The row of a cluster."""
    return (
        summary["ClusterName"],
        summary["ClusterStatus"],
        time_text(summary["CreationTime"]),
        summary["ClusterArn"],
    )


def facts(cluster: ObjectView) -> Iterator[tuple[str, str]]:
    """Name and value of each line about a cluster."""
    yield "Name", cluster["ClusterName"]
    yield "ARN", cluster["ClusterArn"]
    yield "Status", cluster["ClusterStatus"]
    if cluster.get("FailureMessage"):
        yield "Failure", cluster["FailureMessage"]
    yield "Created", time_text(cluster["CreationTime"])
    yield "Node recovery", cluster["NodeRecovery"]
    yield "Provisioning", cluster.get("NodeProvisioningMode") or "all or nothing"


def group_rows(cluster: ObjectView) -> Iterator[tuple[object, ...]]:
    """The rows of a cluster's groups."""
    for item in cluster["InstanceGroups"]:
        types = [detail["InstanceType"] for detail in item.get("InstanceTypeDetails") or ()]
        yield (
            item["InstanceGroupName"],
            ",".join(types),
            item["Status"],
            item["CurrentCount"],
            item["TargetCount"],
            ",".join(item.get("OnStartDeepHealthChecks") or ()) or "-",
        )


def progress(cluster: ObjectView) -> dict[str, str]:
    """A line for the cluster (key: empty) and a line for each group, by name."""
    name = cluster["ClusterName"]
    failure = f": {cluster['FailureMessage']}" if cluster.get("FailureMessage") else ""
    lines = {"": f"{name}: {cluster['ClusterStatus']}{failure}"}
    for item in cluster["InstanceGroups"]:
        group = item["InstanceGroupName"]
        count = f"{item['CurrentCount']} of {item['TargetCount']}"
        lines[group] = f"{name}/{group}: {item['Status']}, {count} up"
    return lines


T = TypeVar("T")
Object = dict[str, Any]
LOOK_SECONDS = 1.0
"""Interval of polling a cluster; the API has no way to wait."""

app = App(
    help="Manage clusters of machines: groups with lifecycle scripts, deep checks and repair."
    "\n\nThe same operations as `aws sagemaker create-cluster` and others, at the address from "
    "`unbroken status`."
    "\n\nExample: `unbroken cluster describe train-cluster`",
    no_args_is_help=True,
)


Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="Name or ARN of the cluster.")]
Input = Annotated[
    str,
    typer.Option(
        "--cli-input-json",
        metavar="FILE",
        help="The request as JSON, in the form of the aws CLI; - for standard input.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the operation is complete.")]


@dataclass(frozen=True, slots=True)
class Api:
    """The cluster API that is called."""

    url: EndpointUrl = None
    directory: LocalDirectory = None
    context: Context = None

    def call(self, act: Callable[[Client], Awaitable[T]]) -> T:
        """Run `act` with a client of the cluster API."""
        from unbroken.cluster_api.client import connected  # slow to load

        place = endpoint(self.url, self.directory, self.context)

        async def run() -> T:
            async with connected(
                place.url, place.credential, place.region, place.ca_bundle
            ) as client:
                return await act(client)

        return asyncio.run(run())


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFlags:
    """The form of the answer, and the cluster API that is called."""

    output: Form = Output.TEXT
    api: Api

    def call(self, act: Callable[[Client], Awaitable[T]]) -> T:
        """Run `act` with a client of the cluster API."""
        return self.api.call(act)


@app.command()
def create(request: Input, wait: Wait = False, *, api: ApiFlags) -> None:
    """Create a cluster. Exit status 1: it failed.

    Example: `unbroken cluster create --cli-input-json request.json --wait`
    """
    body = read_request(request)
    result = _operate(api, "CreateCluster", body, wait=wait)
    _print_outcome(result, api.output, wait, f"cluster {body.get('ClusterName')} is being created")


@app.command("list")
def list_command(output: ListForm = ListOutput.TEXT, *, api: Api) -> None:
    """List the clusters.

    Example: `unbroken cluster list`
    """

    async def act(client: Client) -> list[Object]:
        pages = client.pages("ListClusters", "ClusterSummaries", {"SortBy": "NAME"})
        return [page async for page in pages]

    result = api.call(act)
    listing = Listing(
        {"ClusterSummaries": result},
        [str(item["ClusterName"]) for item in result],
        CLUSTER_TITLES,
        [cluster_row(item) for item in result],
        empty="no clusters; create one with: unbroken cluster create --cli-input-json FILE",
    )
    show_list(listing, output)


@app.command()
def describe(cluster: Name, api: ApiFlags) -> None:
    """Show a cluster and its groups.

    Example: `unbroken cluster describe lab`
    """

    async def act(client: Client) -> Object:
        return await client.call("DescribeCluster", {"ClusterName": cluster})

    _show(api.call(act), api.output)


@app.command()
def update(request: Input, wait: Wait = False, *, api: ApiFlags) -> None:
    """Change a cluster: its groups, their counts, NodeRecovery. Exit status 1: it failed.

    Example: `unbroken cluster update --cli-input-json request.json`
    """
    body = read_request(request)
    result = _operate(api, "UpdateCluster", body, wait=wait)
    _print_outcome(result, api.output, wait, f"cluster {body.get('ClusterName')} is being updated")


@app.command()
def delete(
    cluster: Name,
    wait: Wait = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    *,
    api: ApiFlags,
) -> None:
    """Delete a cluster with all its machines.

    Example: `unbroken cluster delete lab --yes`
    """
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete cluster {cluster} with all its machines?", abort=True)

    async def act(client: Client) -> Object:
        made = await client.call("DeleteCluster", {"ClusterName": cluster})
        if wait:
            await _until_gone(client, made["ClusterArn"])
        return made

    result = api.call(act)
    done = "is deleted" if wait else "is being deleted"
    _print_outcome(result, api.output, False, f"cluster {cluster} {done}")


def read_request(name: str) -> Object:
    """Read a request from a file; the name may begin with `file://`, as for the aws CLI."""
    path = os.path.expanduser(name.removeprefix("file://"))
    try:
        result = msgspec.json.decode(read_text(path))
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise SpecError(f'{path} must hold an object, such as {{"ClusterName": ...}}')
    return result


def _operate(api: ApiFlags, operation: str, body: Object, *, wait: bool) -> Object:
    """The answer to the operation; with `wait`, the cluster when the operation is complete."""

    async def act(client: Client) -> Object:
        made = await client.call(operation, body)
        return await _until_settled(client, made["ClusterArn"]) if wait else made

    return api.call(act)


async def _until_settled(client: Client, arn: str) -> Object:
    """The cluster when no operation is in progress; changes are printed to standard error."""
    from unbroken.kube.clock import pause

    shown: Mapping[str, str] = {}
    while True:
        result = await client.call("DescribeCluster", {"ClusterName": arn})
        now = progress(result)
        for key, line in now.items():
            if shown.get(key) != line:
                note(line)
        shown = now
        if _is_settled(result):
            return result
        await pause(LOOK_SECONDS)


def _is_settled(found: Object) -> bool:
    if found["ClusterStatus"] == "Failed":
        return True
    phases = {item["Status"] for item in found["InstanceGroups"]}
    return found["ClusterStatus"] == "InService" and phases <= {"InService", "Failed"}


async def _until_gone(client: Client, arn: str) -> None:
    from unbroken.cluster_api.client import ClusterApiRefused
    from unbroken.kube.clock import pause

    while True:
        try:
            await client.call("DescribeCluster", {"ClusterName": arn})
        except ClusterApiRefused as refused:
            if refused.code == "ResourceNotFound":
                return
            raise
        await pause(LOOK_SECONDS)


def _print_outcome(found: Object, output: Output, has_waited: bool, text: str) -> None:
    if has_waited:
        _show(found, output)
        if found["ClusterStatus"] == "Failed":
            raise typer.Exit(1)
    elif output.is_data:
        output.print(found)
    else:
        print(f"{text}: {found['ClusterArn']}")


def _show(found: Object, output: Output) -> None:
    if output.is_data:
        output.print(found)
        return
    for name, value in facts(found):
        print(f"{name + ':':<16}{value}")
    print()
    print_table(GROUP_TITLES, group_rows(found))

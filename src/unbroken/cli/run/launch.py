"""Starts the local cluster if necessary, creates the job of `unbroken run` and follows it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.agent import shell
from unbroken.cli.connection import JOBS, SECRETS, Cluster, Object, on_cluster
from unbroken.cli.job.explain import as_value
from unbroken.cli.job.views import job_summary
from unbroken.cli.job.views import state as job_state
from unbroken.cli.local.up import start_detached
from unbroken.cli.options import Output
from unbroken.cli.place import ClusterPlace
from unbroken.cli.show import note
from unbroken.errors import SpecError, WorldError
from unbroken.kube.errors import AlreadyExists
from unbroken.local import state
from unbroken.nodes.file_watch import DirectoryWatch

from . import manifests
from .manifests import JobManifest, RunScript

JobSource = JobManifest | RunScript
LOOK_SECONDS = 1.0
"""Longest time between two looks for a cluster that another command starts or stops."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A job to run, and the options for it."""

    source: JobSource
    name: str | None
    is_detached: bool
    output: Output


def pods_of(source: JobSource) -> int:
    """Number of pods of the job."""
    if isinstance(source, RunScript):
        return source.sizes.nnodes + source.sizes.spares
    return sum(spec.replicas + spec.spares for spec in source.parsed.spec.replica_specs)


def start_cluster(place: ClusterPlace, pods: int) -> None:
    """Start the local cluster with a node for each pod, unless it runs or another command starts
    it."""
    if place.paths is None or state.running(place.paths) is not None:
        return
    saved = state.saved_options(place.paths)
    options = msgspec.structs.replace(saved, nodes=max(pods, saved.nodes))
    note(f"unbroken: starting a cluster of {options.nodes} node(s) in {place.paths.directory}")
    while state.running(place.paths) is None:
        if state.is_up(place.paths):
            note("unbroken: another command starts or stops the cluster; waiting for it")
            asyncio.run(_other_command(place.paths))
            continue
        try:
            start_detached(place.paths, options)
        except WorldError:
            if not state.is_up(place.paths):
                raise
    note(f"unbroken: it is ready and keeps running after the job; stop it with: {_down(place)}")


async def _other_command(paths: state.Paths) -> None:
    """Wait while another command starts or stops the cluster."""
    with DirectoryWatch(paths.directory) as watch:
        while state.is_up(paths) and state.running(paths) is None:
            watch.changed.clear()
            with suppress(TimeoutError):  # a command that is killed changes nothing there
                async with asyncio.timeout(LOOK_SECONDS):
                    await watch.changed.wait()


def _down(place: ClusterPlace) -> str:
    assert place.paths is not None
    return f"unbroken down --dir {place.paths.directory}"


def run_job(place: ClusterPlace, namespace: str, request: RunRequest) -> int:
    """Create the job, follow it unless detached, and return the exit code of the command."""

    async def act(cluster: Cluster) -> int:
        with _standard_input(request) as stdin:
            job = await _create(cluster, request, stdin)
            if request.is_detached:
                _print_created(job, request.output)
                return 0
            return await _follow(cluster, job, request.output)

    return on_cluster(place, namespace, act)


@contextmanager
def _standard_input(request: RunRequest) -> Iterator[str]:
    """Hand this process's standard input to the pods of a script; the name that they ask for it."""
    is_wanted = isinstance(request.source, RunScript) and not request.is_detached
    server = shell.listen() if is_wanted else None
    if server is None:
        yield ""
        return
    loop = asyncio.get_running_loop()
    borrowers: list[socket.socket] = []
    loop.add_reader(server, shell.hand_over, server, borrowers)
    try:
        yield server.getsockname()[1:].decode()
    finally:
        loop.remove_reader(server)
        for one in (server, *borrowers):
            one.close()


async def _create(cluster: Cluster, request: RunRequest, stdin: str) -> Object:
    source = request.source
    if isinstance(source, RunScript):
        variables = manifests.environment(source, stdin)
        return await _create_of_script(cluster, source, request.name, variables)
    for other in source.others:
        await _apply(cluster, other)
    return await _claim(cluster, source.job)


async def _claim(cluster: Cluster, job: Object) -> Object:
    """Create a job; SpecError if one of its name exists."""
    name = job["metadata"].get("name")
    try:
        return await cluster.create(JOBS, job)
    except AlreadyExists:
        found = await cluster.find(JOBS, name)
    has_state = f" ({job_state(found)})" if found else ""
    raise SpecError(
        f"job {name} already exists{has_state}; "
        f"delete it with `unbroken delete {name}`, or give this job another --name"
    )


async def _create_of_script(
    cluster: Cluster, script: RunScript, name: str | None, variables: Mapping[str, str]
) -> Object:
    """Create the job of a script, then the Secret of its environment, then let the job start.

    Creation claims the name: other commands may choose the same one at the same time. The job owns
    the Secret from its first moment, so none is left behind without its job.
    """
    if name is not None:
        made = await _claim(cluster, manifests.held(manifests.of_script(script, name).job))
    else:
        made = await _first_free(cluster, script)
    name = made["metadata"]["name"]
    try:
        secret = await cluster.create(SECRETS, manifests.environment_secret(made, variables))
        released = manifests.released(made, secret["metadata"]["name"])
        return await cluster.patch(JOBS, name, released)
    except BaseException:
        await cluster.delete(JOBS, name)
        raise


async def _first_free(cluster: Cluster, script: RunScript) -> Object:
    """Create the job under the first free name of the script."""
    taken = {job["metadata"]["name"] for job in await cluster.select(JOBS)}
    while True:
        name = manifests.script_name(script.program, taken)
        try:
            return await cluster.create(JOBS, manifests.held(manifests.of_script(script, name).job))
        except AlreadyExists:
            taken.add(name)


async def _apply(cluster: Cluster, value: Object) -> None:
    """Apply an object of a built-in kind, as `kubectl apply --server-side` does."""
    from lightkube import codecs
    from lightkube.core.exceptions import LoadResourceError
    from lightkube.core.resource import NamespacedResource

    from unbroken.kube.client import api_errors

    metadata = value.get("metadata") or {}
    title = f"{value['kind']} {metadata.get('name')}"
    try:
        kind = type(codecs.from_dict({**value, "metadata": metadata}))
    except LoadResourceError as error:
        raise SpecError(f"{title}: apply it with kubectl first ({error})") from error
    if issubclass(kind, NamespacedResource):
        metadata = {"namespace": cluster.namespace, **metadata}
    typed: Any = codecs.from_dict({**value, "metadata": metadata})
    with api_errors(f"apply {title}"):
        await cluster.client.apply(typed)


def _print_created(job: Object, output: Output) -> None:
    if output.is_data:
        output.print(job_summary(job))
        return
    name = job["metadata"]["name"]
    print(f"{name}: created; follow it with: unbroken logs -f {name}")


async def _follow(cluster: Cluster, job: Object, output: Output) -> int:
    from unbroken.cli.watch import WatchedJob

    from .follow import (
        Follower,  # slow to load
        open_screen,
    )

    name = job["metadata"]["name"]
    async with WatchedJob(cluster, name) as watched:
        await watched.until(lambda: watched.has_job(job["metadata"]["uid"]))
        with open_screen(is_data=output.is_data) as screen:
            outcome = await Follower(cluster, job, watched, screen).run()
    if output.is_data:
        incidents = [as_value(incident) for incident in outcome.incidents]
        output.print(
            {
                **job_summary(outcome.job),
                "exitCode": outcome.exit_code,
                "incidents": incidents,
            }
        )
    return outcome.exit_code

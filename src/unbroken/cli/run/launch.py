"""Starts the local cluster if necessary, creates the job of `unbroken run` and follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.cli.connection import JOBS, SECRETS, Cluster, Object, on_cluster
from unbroken.cli.job.explain import as_value
from unbroken.cli.job.views import job_summary
from unbroken.cli.job.views import state as job_state
from unbroken.cli.local.up import start_detached
from unbroken.cli.options import Output
from unbroken.cli.place import Place
from unbroken.cli.show import note
from unbroken.errors import SpecError
from unbroken.local import state

from . import manifests
from .manifests import Manifest, Script

JobSource = Manifest | Script


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A job to run, and the options for it."""

    source: JobSource
    name: str | None
    is_detached: bool
    output: Output


def pods_of(source: JobSource) -> int:
    """Number of pods of the job."""
    if isinstance(source, Script):
        return source.sizes.nnodes + source.sizes.spares
    return sum(spec.replicas + spec.spares for spec in source.parsed.spec.replica_specs)


def start_cluster(place: Place, pods: int) -> None:
    """Start the local cluster with a node for each pod, unless it runs."""
    if place.paths is None or state.running(place.paths) is not None:
        return
    saved = state.saved_options(place.paths)
    options = msgspec.structs.replace(saved, nodes=max(pods, saved.nodes))
    note(f"unbroken: starting a cluster of {options.nodes} node(s) in {place.paths.directory}")
    start_detached(place.paths, options)
    note(f"unbroken: it is ready and keeps running after the job; stop it with: {_down(place)}")


def _down(place: Place) -> str:
    assert place.paths is not None
    return f"unbroken down --dir {place.paths.directory}"


def run_job(place: Place, namespace: str, request: RunRequest) -> int:
    """Create the job, follow it unless detached, and return the exit code of the command."""

    async def act(cluster: Cluster) -> int:
        job = await _create(cluster, request)
        if request.is_detached:
            _print_created(job, request.output)
            return 0
        return await _follow(cluster, job, request.output)

    return on_cluster(place, namespace, act)


async def _create(cluster: Cluster, request: RunRequest) -> Object:
    jobs = await cluster.select(JOBS)
    taken = {job["metadata"]["name"]: job for job in jobs}
    source = request.source
    if isinstance(source, Script):
        name = request.name or manifests.script_name(source.program, taken)
        manifest = manifests.of_script(source, name)
    else:
        manifest = source
    _require_free(manifest.job["metadata"].get("name"), taken)
    for other in manifest.others:
        await _apply(cluster, other)
    if not isinstance(source, Script):
        return await cluster.create(JOBS, manifest.job)
    return await _create_with_environment(cluster, manifest.job)


def _require_free(name: str | None, taken: dict[str, Object]) -> None:
    if name in taken:
        raise SpecError(
            f"job {name} already exists ({job_state(taken[name])}); "
            f"delete it with `unbroken delete {name}`, or give this job another --name"
        )


async def _create_with_environment(cluster: Cluster, job: Object) -> Object:
    """Create the Secret of the environment before the job, then make the job its owner.

    The API server chooses a new name, so that no Secret of another job or user is replaced.
    """
    created = await cluster.create(SECRETS, manifests.environment_secret(job["metadata"]["name"]))
    secret = created["metadata"]["name"]
    try:
        made = await cluster.create(JOBS, manifests.with_environment(job, secret))
    except BaseException:
        await cluster.delete(SECRETS, secret)
        raise
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }
    await cluster.patch(SECRETS, secret, {"metadata": {"ownerReferences": [owner]}})
    return made


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
    from unbroken.cli.job.watching import Watched

    from .follow import Follower  # slow to load
    from .screen import open_screen

    name = job["metadata"]["name"]
    async with Watched(cluster, name) as watched:
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

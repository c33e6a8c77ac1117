"""Requests to the Kubernetes API: to which path they go, and which object they change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from unbroken.cli.connection import INCIDENTS, JOBS, Cluster
from unbroken.cli.job.change import restart_job, resume_job, suspend_job
from unbroken.cli.job.detectors import set_modes
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError
from unbroken.kube.client import connect
from unbroken.kube.errors import Conflict

PATH = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/train"


class Api:
    """An API in which another job gets the name of the first one after each read."""

    def __init__(self) -> None:
        self.uid = 1
        self.changed: list[str] = []

    def job(self) -> dict[str, Any]:
        return {"metadata": {"name": "train", "namespace": "default", "uid": str(self.uid)}}

    async def get(self, request: web.Request) -> web.Response:
        read = web.json_response(self.job())
        self.uid += 1
        return read

    async def patch(self, request: web.Request) -> web.Response:
        asked = (await request.json()).get("metadata", {}).get("uid", str(self.uid))
        if asked != str(self.uid):
            status = {"kind": "Status", "code": 409, "reason": "Conflict", "message": "other uid"}
            return web.json_response(status, status=409)
        self.changed.append(asked)
        return web.json_response(self.job())


def kubeconfig(folder: Path, port: int) -> Path:
    file = folder / "kubeconfig"
    content = {
        "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "users": [{"name": "a", "user": {}}],
        "current-context": "a",
    }
    file.write_text(yaml.safe_dump(content))
    return file


@asynccontextmanager
async def served(folder: Path, app: web.Application) -> AsyncIterator[Cluster]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = kubeconfig(folder, runner.addresses[0][1])
        async with connect(file) as client:
            yield Cluster(ClusterPlace(str(file)), client, "default")
    finally:
        await runner.cleanup()


async def test_no_order_changes_a_later_job_of_the_same_name(tmp_path: Path) -> None:
    api, app = Api(), web.Application()
    app.router.add_get(PATH, api.get)
    app.router.add_patch(PATH, api.patch)
    async with served(tmp_path, app) as cluster:
        for act in (restart_job, suspend_job, resume_job, partial(set_modes, changes=["nan=off"])):
            with pytest.raises(Conflict, match="other uid"):
                await act(cluster, await cluster.job("train"))
    assert api.changed == []


async def test_an_incident_of_another_namespace_is_not_of_the_job(tmp_path: Path) -> None:
    metadata = {"name": "train-1", "ownerReferences": [{"uid": "1"}]}
    items = [{"metadata": {**metadata, "namespace": one}} for one in ("default", "other")]

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"items": items})

    app = web.Application()
    app.router.add_get(f"/{INCIDENTS.prefix}/{INCIDENTS.plural}", listed)
    job = {"metadata": {"name": "train", "namespace": "default", "uid": "1"}}
    async with served(tmp_path, app) as cluster:
        found = await cluster.incidents_of([job], "")
    assert [len(one) for one in found.values()] == [1]


@pytest.mark.parametrize("part", [".", "..", "train/status", "../default", "/", "a/b"])
async def test_no_name_leads_to_another_path(tmp_path: Path, part: str) -> None:
    file = kubeconfig(tmp_path, 1)
    async with connect(file) as client:
        inside = Cluster(ClusterPlace(str(file)), client, "default")
        for wrong, name in ((inside, part), (Cluster(inside.place, client, part), "train")):
            with pytest.raises(SpecError, match="is no name of an object"):
                wrong.path(JOBS, name)
        assert inside.path(JOBS, 'a"b?c') == f"{PATH.removesuffix('train')[1:]}a%22b%3Fc"

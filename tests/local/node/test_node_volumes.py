"""Volumes made from objects: they follow their objects while the pod runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.node.node_world import PODS, World, in_world, processes_of, shell
from tests.watching import until
from unbroken.local.node.pods.volumes import File, Files, provide

BASE = "api/v1/namespaces/default"

MOUNTS = [
    {"name": "c", "mountPath": "/mnt/c"},
    {"name": "c", "mountPath": "/mnt/fixed", "subPath": "lr"},
    {"name": "s", "mountPath": "/mnt/s"},
    {"name": "d", "mountPath": "/mnt/d"},
    {"name": "all", "mountPath": "/mnt/all"},
]
LABELS = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
VOLUMES = [
    {"name": "c", "configMap": {"name": "live"}},
    {"name": "s", "secret": {"secretName": "live"}},
    {"name": "d", "downwardAPI": {"items": [LABELS]}},
    {
        "name": "all",
        "projected": {
            "sources": [
                {"configMap": {"name": "live", "items": [{"key": "lr", "path": "deep/lr"}]}},
                {"secret": {"name": "live"}},
            ]
        },
    },
]
UNTIL_NEW = """
until [ "$(cat /mnt/s/key /mnt/all/key)" = newernewer ]; do sleep 0.1; done
echo secret
until [ "$(cat /mnt/c/lr /mnt/all/deep/lr)" = 0.010.01 ] && [ ! -e /mnt/c/gone ] &&
    [ -e /mnt/c/more ]
do sleep 0.1; done
echo map
until grep -q 'stage="main"' /mnt/d/labels; do sleep 0.1; done
cat /mnt/fixed
"""
"""Each change waits for the one before: any of them makes all volumes of the pod anew."""


@pytest.fixture(name="tell")
def _tell(tmp_path: Path) -> Callable[..., None]:
    return lambda story: in_world(tmp_path, story)


@pytest.mark.slow
def test_mounted_objects_and_labels_follow_their_objects_and_a_sub_path_stays(
    tell: Callable[..., None],
) -> None:
    async def story(world: World) -> None:
        meta = {"metadata": {"name": "live"}}
        data = {"lr": "0.1", "gone": "x"}
        await world.post(f"{BASE}/configmaps", {**meta, "data": data})
        await world.post(f"{BASE}/secrets", {**meta, "stringData": {"key": "old"}})
        async with world.node():
            main = shell(UNTIL_NEW, volumeMounts=MOUNTS)
            await world.create("p", main, volumes=VOLUMES, restartPolicy="Never")
            await world.phase("p", "Running")
            await world.client.merge(f"{BASE}/secrets/live", {"stringData": {"key": "newer"}})
            await until(lambda: world.logs("p"), "secret\n".__eq__)
            change = {"data": {"lr": "0.01", "gone": None, "more": ""}}
            await world.client.merge(f"{BASE}/configmaps/live", change)
            await until(lambda: world.logs("p"), "secret\nmap\n".__eq__)
            label = {"metadata": {"labels": {"stage": "main"}}}
            await world.client.merge(f"{PODS}/p", label)
            await world.phase("p", "Succeeded")
            assert await world.logs("p") == "secret\nmap\n0.1"

    tell(story)


@pytest.mark.slow
def test_volumes_follow_objects_that_changed_while_no_runner_was_here(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        meta = {"metadata": {"name": "live"}}
        await world.post(f"{BASE}/configmaps", {**meta, "data": {"lr": "0.1"}})
        text = "until grep -q 0.01 /mnt/c/lr; do sleep 0.1; done"
        async with world.node():
            main = shell(text, volumeMounts=MOUNTS[:1])
            await world.create("p", main, volumes=VOLUMES[:1], restartPolicy="Never")
            await world.phase("p", "Running")
        assert processes_of(tmp_path, "p")
        await world.client.merge(f"{BASE}/configmaps/live", {"data": {"lr": "0.01"}})
        async with world.node():
            await world.phase("p", "Succeeded")

    tell(story)


@pytest.mark.slow
def test_volumes_keep_the_files_of_an_object_that_is_deleted_and_follow_the_next(
    tell: Callable[..., None],
) -> None:
    async def story(world: World) -> None:
        meta = {"metadata": {"name": "live"}}
        await world.post(f"{BASE}/configmaps", {**meta, "data": {"lr": "0.1"}})
        text = "while sleep 0.1; do v=$(cat /mnt/c/lr) || exit 1; [ $v = 0.01 ] && exit 0; done"
        async with world.node():
            main = shell(text, volumeMounts=MOUNTS[:1])
            await world.create("p", main, volumes=VOLUMES[:1], restartPolicy="Never")
            await world.phase("p", "Running")
            await world.client.raw("DELETE", f"{BASE}/configmaps/live")
            await world.recorded({"FailedMount"})
            await world.post(f"{BASE}/configmaps", {**meta, "data": {"lr": "0.01"}})
            await world.phase("p", "Succeeded")

    tell(story)


def test_files_of_a_volume_change_together_and_leave_nothing_behind(tmp_path: Path) -> None:
    def publish(**files: str) -> Path:
        wanted = {name.replace("__", "/"): File(t.encode(), 0o640) for name, t in files.items()}
        return provide("v", Files(wanted), tmp_path, "uid")

    # A volume of an earlier version: plain files and folders.
    old = tmp_path / "volumes/v"
    (old / "dir").mkdir(parents=True)
    (old / "dir/a").write_text("old")
    (old / "b").write_text("old")
    place = publish(dir__a="1", b="1")
    assert [(place / name).read_text() for name in ("dir/a", "b")] == ["1", "1"]
    assert (place / "b").stat().st_mode & 0o777 == 0o640
    first = os.readlink(place / "..data")
    assert os.readlink(publish(dir__a="1", b="1") / "..data") == first, "nothing changed"
    with (place / "b").open() as reader:
        publish(b="2", c="2")
        assert reader.read() == "1"
    second = os.readlink(place / "..data")
    assert sorted(os.listdir(place)) == sorted(["..data", second, "b", "c"])
    assert (place / "b").read_text() == (place / "c").read_text() == "2"
    publish()
    assert sorted(os.listdir(place)) == sorted(["..data", os.readlink(place / "..data")])

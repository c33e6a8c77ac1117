"""When commands that follow objects end because their local cluster was stopped."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apiservers import kubeconfig_of
from unbroken.cli import watch
from unbroken.cli.connection import Cluster
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError
from unbroken.kube.client import connect
from unbroken.local.state import Paths, is_up, running

STARTS = """
import sys
from pathlib import Path
from unbroken.local.state import Paths
from unbroken.local.up import _sole
with _sole(Paths(Path(sys.argv[1]))):
    print("starts", flush=True)
    sys.stdin.read()
"""


async def changed(folder: Path, times: int) -> None:
    """Let so many changes come one after another, of a cluster in a folder."""
    (folder / "config").write_text(kubeconfig_of("http://127.0.0.1:1", "", "t"))
    async with connect(folder / "config") as client:
        watched = watch.ClusterWatch(Cluster(ClusterPlace(paths=Paths(folder)), client, "default"))
        for _ in range(times):
            asyncio.get_running_loop().call_soon(watched.wake)
            assert await watched.change()


async def test_many_changes_do_not_shorten_the_wait_for_a_cluster(tmp_path: Path) -> None:
    await changed(tmp_path, 100)


async def test_a_cluster_that_is_being_started_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GONE_SECONDS", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None
        assert up.stdout.readline() == "starts\n"
        assert is_up(Paths(tmp_path))
        assert running(Paths(tmp_path)) is None
        await changed(tmp_path, 3)
        up.kill()
    assert not is_up(Paths(tmp_path))
    with pytest.raises(SpecError, match="no cluster runs from"):
        await changed(tmp_path, 3)


@pytest.mark.parametrize("text", ["", "7", "x y", "1 2 3", "0 0", "-1 5", "9" * 5000 + " 1"])
def test_a_damaged_lock_file_is_no_cluster(text: str, tmp_path: Path) -> None:
    Paths(tmp_path).lock.write_text(text)
    assert not is_up(Paths(tmp_path))

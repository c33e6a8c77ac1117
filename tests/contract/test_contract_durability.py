"""`kill -9` of the local API server: acknowledged writes survive, watchers continue."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Queue

import pytest

from tests.apiclient import Api, Object
from tests.apiservers import CannotStartError, embedded_cluster
from tests.samples import config_map, define, definition, open_schema, widget
from tests.watching import PATIENCE_SECONDS

WRITES = 60
"""Number of writes acknowledged before the server is killed."""


@contextmanager
def serving(folder: Path) -> Iterator[Api]:
    """Run the local API server on `folder`; yield a client in the namespace `default`."""
    try:
        with embedded_cluster(folder) as cluster, closing(Api(cluster, "default")) as api:
            yield api
    except CannotStartError as error:
        pytest.skip(str(error))


def kill(api: Api) -> None:
    """Kill the server with SIGKILL."""
    api.cluster.process.send_signal(signal.SIGKILL)
    api.cluster.process.wait()


def write(api: Api, acknowledged: Queue[Object]) -> None:
    """Create, change and delete config maps until the server is gone."""
    try:
        for number in range(100_000):
            name = f"m-{number}"
            acknowledged.put(api.post("configmaps", config_map(name, n="0")).made)
            changed = api.patch("merge", f"configmaps/{name}", {"data": {"n": "1"}})
            acknowledged.put(changed.made)
            if number % 5 == 4:
                api.delete(f"configmaps/{name}").done()
                acknowledged.put({"gone": name})
    except (OSError, http.client.HTTPException):
        return


def killed_while_writing(api: Api) -> list[Object]:
    """Kill the server in the middle of writes; return the acknowledged writes, in order."""
    queue: Queue[Object] = Queue()
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write, api, queue)
        acknowledged = [queue.get(timeout=PATIENCE_SECONDS) for _ in range(WRITES)]
        kill(api)
        writing.result(timeout=PATIENCE_SECONDS)
    while not queue.empty():
        acknowledged.append(queue.get())
    return acknowledged


def last_states(acknowledged: list[Object]) -> dict[str, Object | None]:
    """Return the states that must be there, by name; None: gone."""
    states: dict[str, Object | None] = {}
    for each in acknowledged:
        if "gone" in each:
            states[each["gone"]] = None
        else:
            states[each["metadata"]["name"]] = each
    return states


def test_kill_loses_no_acknowledged_write(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as api:
        states = last_states(killed_while_writing(api))
    # The last object may be newer than its acknowledged state: the answer was lost, not the write.
    last = list(states)[-1]
    with serving(folder) as api:
        listed = api.get("configmaps").made["items"]
    found = {item["metadata"]["name"]: item for item in listed}
    for name, state in states.items():
        if name == last:
            continue
        if state is None:
            assert name not in found
        else:
            assert found[name]["metadata"] == state["metadata"]
            assert found[name]["data"] == state["data"]


def test_versions_go_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as api:
        acknowledged = killed_while_writing(api)
    newest = max(int(e["metadata"]["resourceVersion"]) for e in acknowledged if "gone" not in e)
    with serving(folder) as api:
        made = api.post("configmaps", config_map("after")).made
    assert int(made["metadata"]["resourceVersion"]) > newest


def test_watch_resumes_by_version_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as api:
        acknowledged = killed_while_writing(api)
    version = acknowledged[9]["metadata"]["resourceVersion"]
    expected = [each for each in acknowledged[10:] if "gone" not in each]
    with (
        serving(folder) as api,
        api.watch("configmaps", resourceVersion=version) as events,
    ):
        seen = [events.event() for _ in range(len(acknowledged) - 10)]
    kept = [event["object"] for event in seen if event["type"] != "DELETED"]
    assert kept == expected


def test_definitions_and_their_objects_survive_a_kill(tmp_path: Path) -> None:
    folder, group = tmp_path / "state", "kill.example.com"
    with serving(folder) as api:
        define(api, definition(group, open_schema(size={"type": "integer"})))
        body = widget(group, "a", spec={"size": 1})
        made = api.post(f"{group}/v1:widgets", body).made
        kill(api)
    with serving(folder) as api:
        assert api.get(f"{group}/v1:widgets/a").made == made
        assert api.post(f"{group}/v1:widgets", widget(group, "b", spec={"size": "x"})).code == 422


def test_clients_find_the_server_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as api:
        first = api.cluster
        kill(api)
    with serving(folder) as api:
        assert (api.cluster.url, api.cluster.token) == (first.url, first.token)
        assert api.cluster.ca == first.ca


def test_second_server_on_one_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as api:
        second = embedded_cluster(folder)
        with pytest.raises(RuntimeError, match="embedded API server said"):
            second.__enter__()
        assert api.get("/version").code == 200


def test_kubeconfig_is_for_its_owner_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as api:
        assert api.cluster.kubeconfig.stat().st_mode & 0o077 == 0


def test_only_loopback_is_listened_on(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as api:
        assert api.cluster.url.split("//")[1].startswith("127.0.0.1:")
        inodes = {
            link.readlink().name.removeprefix("socket:[").rstrip("]")
            for link in Path(f"/proc/{api.cluster.process.pid}/fd").iterdir()
            if link.is_symlink() and "socket:" in str(link.readlink())
        }
        listening = [
            fields[1]
            for table in ("tcp", "tcp6")
            for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
            if fields[3] == "0A" and fields[9] in inodes
        ]
    assert listening
    assert all(address.startswith("0100007F:") for address in listening)

"""A node with real processes under the local API server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.local.node.node_world import (
    World,
    condition,
    in_world,
    node_index,
    processes_of,
    shell,
    state,
)
from unbroken.local.networks import node_address
from unbroken.local.node import stop_pods
from unbroken.local.node.processes.process import readable

pytestmark = pytest.mark.slow

Story = Callable[[World], Awaitable[None]]
Tell = Callable[[Story], None]


@pytest.fixture
def tell(tmp_path: Path) -> Iterator[Tell]:
    """Run a story; check at its end that no process of the world's pods lives."""
    yield lambda story: in_world(tmp_path, story)
    asyncio.run(stop_pods(tmp_path / "node"))
    assert processes_of(tmp_path) == []


def test_a_pod_runs_to_its_end_and_says_so(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            await world.create("p", shell("echo hello; exit 3"), restartPolicy="Never")
            pod = await world.phase("p", "Failed")
            terminated = state(pod)["state"]["terminated"]
            assert (terminated["exitCode"], terminated["reason"]) == (3, "Error")
            assert await world.logs("p") == "hello\n"

    tell(story)


def test_the_node_says_what_it_has(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node(gpus=2):
            node = await world.get("api/v1/nodes/n1")
            assert node is not None
            assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
            assert node["status"]["capacity"]["cpu"] == "2"
            assert node["metadata"]["labels"]["zone"] == "z"
            assert node["metadata"]["labels"]["kubernetes.io/hostname"] == "n1"
            ready = {c["type"]: c["status"] for c in node["status"]["conditions"]}
            assert ready == {
                "Ready": "True",
                "MemoryPressure": "False",
                "DiskPressure": "False",
                "PIDPressure": "False",
            }
        cordon = {"spec": {"unschedulable": True}}
        headers = {"Content-Type": "application/merge-patch+json"}
        await world.client.raw("PATCH", "api/v1/nodes/n1", body=cordon, headers=headers)
        async with world.node():
            node = await world.get("api/v1/nodes/n1")
            assert node is not None
            assert node["spec"]["unschedulable"] is True, "a restart keeps the cordon"

    tell(story)


def test_environment_volumes_and_names(tell: Tell) -> None:
    text = (
        "cat /config/k /secret/s; cat /shared/from-init; echo $V $IP; hostname; pwd;"
        "getent hosts $(hostname) | cut -d' ' -f1; echo bye > /dev/termination-log"
    )

    async def story(world: World) -> None:
        base = "api/v1/namespaces/default"
        meta = {"metadata": {"name": "c"}}
        await world.post(f"{base}/configmaps", {**meta, "data": {"k": "config\n"}})
        await world.post(f"{base}/secrets", {**meta, "stringData": {"s": "secret\n"}})
        shared = {"name": "e", "mountPath": "/shared"}
        main = shell(
            text,
            workingDir="/work-here",
            env=[
                {"name": "V", "valueFrom": {"secretKeyRef": {"name": "c", "key": "s"}}},
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
            volumeMounts=[
                shared,
                {"name": "c", "mountPath": "/config"},
                {"name": "s", "mountPath": "/secret"},
            ],
        )
        init = shell("echo init > /shared/from-init", "i", volumeMounts=[shared])
        volumes = [
            {"name": "e", "emptyDir": {}},
            {"name": "c", "configMap": {"name": "c"}},
            {"name": "s", "secret": {"secretName": "c"}},
        ]
        async with world.node():
            await world.create(
                "p", main, initContainers=[init], volumes=volumes, restartPolicy="Never"
            )
            pod = await world.phase("p", "Succeeded")
            address = pod["status"]["podIP"]
            assert (await world.logs("p")).splitlines() == [
                "config",
                "secret",
                "init",
                f"secret {address}",
                "p",
                "/work-here",
                address,
            ]
            assert state(pod)["state"]["terminated"]["message"] == "bye\n"

    tell(story)


SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists("/shared/ready") else 503)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
    def log_message(self, *args): pass
http.server.HTTPServer((os.environ["IP"], 8080), Handler).serve_forever()
"""


def test_two_pods_listen_on_one_port_and_probes_find_them(tell: Tell) -> None:
    async def story(world: World) -> None:
        main = {
            **shell(""),
            "command": ["python3", "-c", SERVER],
            "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"name": "http", "containerPort": 8080}],
            "startupProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
            "readinessProbe": {"httpGet": {"port": "http"}, "periodSeconds": 1},
            "volumeMounts": [{"name": "e", "mountPath": "/shared"}],
        }
        volumes = [{"name": "e", "emptyDir": {}}]
        async with world.node():
            for name in ("a", "b"):
                await world.create(name, main, volumes=volumes, terminationGracePeriodSeconds=1)
            for name in ("a", "b"):
                pod = await world.until(
                    name, lambda pod: pod is not None and pod["status"].get("phase") == "Running"
                )
                await world.until(name, lambda pod: pod is not None and state(pod)["started"])
                assert condition(pod, "Ready") == "False"
                await world.execute(name, "touch", "/shared/ready")
                pod = await world.ready(name)
                reader, writer = await asyncio.open_connection(pod["status"]["podIP"], 8080)
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                assert (await reader.read()).endswith(name.encode())
                writer.close()
                await writer.wait_closed()

    tell(story)


def test_a_failing_liveness_probe_restarts_the_container(tell: Tell) -> None:
    async def story(world: World) -> None:
        probe = {"exec": {"command": ["test", "-e", "alive"]}, "periodSeconds": 1}
        main = shell(
            "touch alive; sleep 1000",
            livenessProbe={**probe, "failureThreshold": 1, "initialDelaySeconds": 1},
        )
        async with world.node():
            await world.create("p", main, terminationGracePeriodSeconds=1)
            await world.ready("p")
            # Running is reported before the shell has reached its first line.
            await world.execute("p", "sh", "-c", "until rm alive; do sleep 0.01; done")
            pod = await world.until(
                "p", lambda pod: pod is not None and state(pod)["restartCount"] == 1
            )
            assert state(pod)["lastState"]["terminated"]["exitCode"] == 143
            assert condition(await world.ready("p"), "Ready") == "True"

    tell(story)


def test_deletion_lets_the_pod_say_goodbye_and_leaves_nothing(tell: Tell) -> None:
    async def story(world: World) -> None:
        armed = {"exec": {"command": ["test", "-e", "armed"]}, "periodSeconds": 1}
        left = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 1000' & touch armed; sleep 1000"
        stubborn = shell(left, readinessProbe=armed)
        text = "trap 'echo bye; exit 0' TERM; touch armed; while :; do sleep 0.1; done"
        polite = shell(text, "polite", readinessProbe=armed)
        async with world.node():
            await world.create("p", stubborn, polite, terminationGracePeriodSeconds=1)
            await world.ready("p")
            assert len(processes_of(world.directory, "p")) >= 4
            await world.delete("p")
            last = await world.until(
                "p", lambda pod: pod is None or "terminated" in state(pod, "polite")["state"]
            )
            if last:
                assert state(last, "polite")["state"]["terminated"]["exitCode"] == 0
            await world.gone("p")
            assert processes_of(world.directory, "p") == []

    tell(story)


def test_a_pod_removed_by_force_is_killed_at_once(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            await world.create("p", shell("trap '' TERM; while :; do sleep 1; done"))
            pod = await world.ready("p")
            uid = pod["metadata"]["uid"]
            supervisor = json.loads(
                (world.node_directory / f"pods/{uid}/containers/main/0/run.json").read_text()
            )["supervisor"]
            fd = os.pidfd_open(supervisor)
            await world.delete("p", grace=0)
            from unbroken.local.node.processes.process import readable

            await readable(fd)
            os.close(fd)
            assert processes_of(world.directory, "p") == []

    tell(story)


def test_what_is_missing_is_waited_for_and_named(tell: Tell) -> None:
    async def story(world: World) -> None:
        env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "later", "key": "k"}}}]
        async with world.node():
            await world.create("p", shell("echo $X", env=env), {"name": "no", "image": "x"})
            pod = await world.until(
                "p",
                lambda pod: (
                    pod is not None
                    and all(
                        s["state"].get("waiting", {}).get("message")
                        for s in pod["status"].get("containerStatuses") or [{"state": {}}]
                    )
                ),
            )
            assert state(pod)["state"]["waiting"] == {
                "reason": "CreateContainerConfigError",
                "message": 'configmap "later" not found',
            }
            assert state(pod, "no")["state"]["waiting"] == {
                "reason": "CreateContainerError",
                "message": "unbroken runs no images: give the container a command",
            }
            assert pod["status"]["phase"] == "Pending"

    tell(story)


def test_logs_of_a_restarted_container_and_followed_to_its_end(tell: Tell) -> None:
    script = "n=$(cat /v/n 2>/dev/null || echo 0); echo $((n+1)) > /v/n; echo run $n; "
    script += "test $n = 0 && exit 1; while ! test -e /v/end; do sleep 0.05; done; echo end"

    async def story(world: World) -> None:
        main = shell(script, volumeMounts=[{"name": "e", "mountPath": "/v"}])
        volumes = [{"name": "e", "emptyDir": {}}]
        async with world.node():
            await world.create("p", main, volumes=volumes, restartPolicy="OnFailure")
            await world.until("p", lambda pod: pod is not None and state(pod)["restartCount"] == 1)
            assert await world.logs("p", previous="true") == "run 0\n"
            async with asyncio.TaskGroup() as tasks:
                followed = tasks.create_task(world.logs("p", follow="true"))
                await world.execute("p", "touch", "/v/end")
            assert followed.result() == "run 1\nend\n"
            await world.phase("p", "Succeeded")
            assert await world.logs("p", tailLines="1") == "end\n"

    tell(story)


def test_commands_see_what_the_container_sees(tell: Tell) -> None:
    async def story(world: World) -> None:
        main = shell(
            "sleep 1000",
            env=[{"name": "A", "value": "b"}],
            workingDir="/somewhere",
        )
        async with world.node():
            await world.create("p", main, terminationGracePeriodSeconds=1)
            await world.ready("p")
            found = await world.execute("p", "sh", "-c", "echo $A; pwd; echo err >&2; exit 4")
            assert (found[1], found[2]) == (b"b\n/somewhere\n", b"err\n")
            status = json.loads(found[3])
            assert status["reason"] == "NonZeroExitCode"
            assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "4"}]
            found = await world.execute("p", "cat", stdin=b"x" * 200_000)
            assert found[1] == b"x" * 200_000
            assert json.loads(found[3])["status"] == "Success"
            found = await world.execute("p", "sh", stdin=b"tty; exit 0\n", tty=True)
            assert b"/dev/pts/" in found[1]
            found = await world.execute("p", "no-such-program")
            assert json.loads(found[3])["reason"] == "InternalError"

    tell(story)


def test_pods_that_do_not_fit_are_refused(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            main = shell("true", resources={"requests": {"cpu": "3"}})
            await world.create("p", main)
            pod = await world.phase("p", "Failed")
            assert pod["status"]["reason"] == "OutOfcpu"

    tell(story)


def test_each_pod_has_gpus_of_its_own(tell: Tell) -> None:
    async def story(world: World) -> None:
        limits = {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}
        async with world.node(gpus=4):
            seen = []
            for name in ("a", "b"):
                main = shell("echo $CUDA_VISIBLE_DEVICES; sleep 1000", resources=limits)
                await world.create(name, main, terminationGracePeriodSeconds=1)
                await world.ready(name)
                found = await world.execute(name, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
                seen.append(found[1])
            assert seen == [b"0,1\n", b"2,3\n"]

    tell(story)


def test_an_image_stands_for_a_python_environment(tell: Tell, tmp_path: Path) -> None:
    program = tmp_path / "environment/bin/greet"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho from $VIRTUAL_ENV\n")
    program.chmod(0o755)
    environment = str(tmp_path / "environment")

    async def story(world: World) -> None:
        async with world.node(images={"team/ray": environment}):
            for name, image in (("tagged", "team/ray:2.60"), ("exact", "team/ray@sha256:0")):
                await world.create(name, {**shell("greet"), "image": image}, restartPolicy="Never")
                await world.phase(name, "Succeeded")
                assert await world.logs(name) == f"from {environment}\n"
            other = {**shell("command -v greet"), "image": "team/ray2:2.60"}
            await world.create("other", other, restartPolicy="Never")
            pod = await world.phase("other", "Failed")
            assert state(pod)["state"]["terminated"]["exitCode"] == 127

    tell(story)


# --- the runner goes and comes back


def test_the_next_runner_finds_the_pods_and_doubles_none(tell: Tell) -> None:
    async def story(world: World) -> None:
        script = "echo start >> /v/starts; while ! test -e /v/end; do sleep 0.05; done; exit 7"
        mounts = [{"name": "e", "mountPath": "/v"}]
        volumes = [{"name": "e", "emptyDir": {}}]
        started = {"exec": {"command": ["test", "-s", "/v/starts"]}, "periodSeconds": 1}
        async with world.node():
            for name in ("stays", "ends", "leaves"):
                await world.create(
                    name,
                    shell(script, volumeMounts=mounts, readinessProbe=started),
                    volumes=volumes,
                    restartPolicy="Never",
                    terminationGracePeriodSeconds=1,
                )
            before = {name: await world.ready(name) for name in ("stays", "ends", "leaves")}
        directory = world.node_directory / "pods"
        leaving = [os.pidfd_open(pid) for pid in processes_of(world.directory, "leaves")]
        assert leaving
        (directory / before["ends"]["metadata"]["uid"] / "volumes/e/end").touch()
        await world.delete("leaves", grace=0)
        async with world.node():
            ended = await world.phase("ends", "Failed")
            assert state(ended)["state"]["terminated"]["exitCode"] == 7
            stays = await world.ready("stays")
            for key in ("containerID", "restartCount"):
                assert state(stays)[key] == state(before["stays"])[key]
            assert stays["status"]["podIP"] == before["stays"]["status"]["podIP"]
            starts = directory / stays["metadata"]["uid"] / "volumes/e/starts"
            assert starts.read_text() == "start\n"
            for handle in leaving:
                await readable(handle)
                os.close(handle)
            await world.create("new", shell("sleep 1000"), terminationGracePeriodSeconds=1)
            new = await world.ready("new")
            assert new["status"]["podIP"] not in {
                pod["status"]["podIP"] for pod in (before["stays"], before["ends"])
            }
            assert (await world.execute("stays", "true"))[3]
            await world.delete("stays")
            await world.gone("stays")

    tell(story)


def test_a_pod_that_has_ended_is_not_run_again(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            await world.create("p", shell("echo once"), restartPolicy="Never")
            await world.phase("p", "Succeeded")
        async with world.node():
            assert await world.logs("p") == "once\n"
            await world.delete("p")
            await world.gone("p")

    tell(story)


def test_stop_pods_ends_everything_within_its_grace(tell: Tell, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.node():
            text = "trap '' TERM; setsid sleep 1000 & sleep 1000"
            await world.create("p", shell(text), terminationGracePeriodSeconds=1)
            await world.ready("p")
            assert processes_of(tmp_path) != []
        await stop_pods(world.directory)
        assert processes_of(tmp_path) == []

    tell(story)


def test_the_server_of_the_node_wants_its_token(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            node = await world.get("api/v1/nodes/n1")
            assert node is not None
            port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
            reader, writer = await asyncio.open_connection(node_address(node_index()), port)
            writer.write(b"GET /containerLogs/default/p/main HTTP/1.0\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    tell(story)


def test_a_taken_port_is_replaced_by_another(tell: Tell) -> None:
    async def story(world: World) -> None:
        with socket.create_server((node_address(node_index()), 10250)):
            async with world.node():
                await world.create("p", shell("echo there"), restartPolicy="Never")
                await world.phase("p", "Succeeded")
                assert await world.logs("p") == "there\n"

    tell(story)


def test_events_tell_what_happened(tell: Tell) -> None:
    async def story(world: World) -> None:
        async with world.node():
            await world.create("p", shell("exit 1"), {"name": "no", "image": "x"})
            await world.recorded({"Started", "Failed", "BackOff"})

    tell(story)

"""Reports of real agents by the operators of a real control plane, as the page asks for them."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Api
from tests.apiservers import free_ports, real_cluster
from tests.cli_calls import Cli, read_until
from tests.e2e.clusters import Cluster, find_kubectl
from tests.operator.realkube import SERVICES, Node, program
from tests.operator.trained_jobs import Job, Operator
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.cli.page.reports import MISSING, Reports, asking_operator, operator_place
from unbroken.wire.agent import AgentState
from unbroken.wire.reports import AUDIENCE

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

SCRIPT = """
import sys, time
from pathlib import Path
from unbroken import worker
finish, step = Path(sys.argv[2]), 0
while not finish.exists():
    step += 1
    worker.progress(step, loss=1.0 / step)
    time.sleep(0.05)
"""
FORM = "application/x-www-form-urlencoded"
READER = "unbroken-page"


@dataclass
class World:
    """A job of four ranks on two nodes, and two operators."""

    api: Api
    job: Job
    ports: list[int]
    operators: list[Operator]

    def token(self, account: str, *audiences: str, namespace: str = "default") -> str:
        """A token of an account that has no rights; without audiences: for the Kubernetes API."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.api.post(accounts, {"metadata": {"name": account}})
        spec = {"audiences": [*audiences]} if audiences else {}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = self.api.post(f"{accounts}/{account}/token", request).made
        return str(made["status"]["token"])

    def limited(self) -> str:
        """A token of an account that may see jobs and incidents, and no pods."""
        token, rbac = self.token("limited"), "/apis/rbac.authorization.k8s.io/v1"
        resources = ["hyperpodpytorchjobs", "incidents"]
        groups = ["sagemaker.amazonaws.com", "unbroken.dev"]
        rule = {"apiGroups": groups, "resources": resources, "verbs": ["get", "list"]}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "limited"}
        subject = {"kind": "ServiceAccount", "name": "limited", "namespace": "default"}
        for plural, rest in (
            ("clusterroles", {"rules": [rule]}),
            ("clusterrolebindings", {"roleRef": role, "subjects": [subject]}),
        ):
            self.api.post(f"{rbac}/{plural}", {"metadata": {"name": "limited"}, **rest}).done()
        return token

    def status(self, port: int, authorization: str, path: str = "default/lm") -> int:
        """HTTP status of an operator's answer; 0: it has ended."""
        url = f"http://127.0.0.1:{port}/v1/reports/{path}"
        request = urllib.request.Request(url, headers={"Authorization": authorization})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except urllib.error.URLError:
            return 0

    def leader(self) -> int:
        """Port of the operator that leads."""
        authorization = f"Bearer {self.token(READER, AUDIENCE)}"
        found: list[int] = []

        def leads() -> bool:
            found[:] = [one for one in self.ports if self.status(one, authorization) == 200]
            return len(found) == 1

        wait_until(leads)
        return found[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("reports")
    cluster = Cluster(folder / "state", find_kubectl())
    cluster.directory.mkdir()
    plane = folder / "plane"
    plane.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(real_cluster(plane))
        kubeconfig = cluster.directory / "kubeconfig"
        kubeconfig.symlink_to(server.kubeconfig)
        services = [sys.executable, "-c", SERVICES, str(kubeconfig), str(folder / "volumes")]
        stack.enter_context(program(services))
        for number in range(2):
            stack.enter_context(Node(cluster, number))
        ports, operators = free_ports(2), []
        for number, port in enumerate(ports):
            options = ("--reports-port", str(port), "--reports-reader", f"default/{READER}")
            one = Operator(cluster, *options, "--metrics-port", "0", log=f"operator-{number}.log")
            operators.append(one)
            stack.callback(one.close)
        for name in ("n0", "n1"):
            cluster.wait(f"node/{name}", "create", seconds=55)
            cluster.wait(f"node/{name}", "condition=Ready")
        cluster.wait_served()
        job = Job(cluster, "lm", folder)
        job.apply(script=SCRIPT)
        stack.callback(job.finish)
        job.wait("Running", seconds=60)
        yield World(stack.enter_context(closing(Api(server))), job, ports, operators)


def asked(
    world: World, tmp_path: Path, port: int, job: str = "lm", host: str = "localhost"
) -> tuple[Reports, str]:
    """The reports that the page gets, and the sentence that it shows."""
    file = tmp_path / "token"
    file.write_text(world.token(READER, AUDIENCE))

    async def ask() -> tuple[Reports, str]:
        async with asking_operator(operator_place(f"{host}:{port}", file)) as operator:
            return await operator.of_job("default", job), operator.problem

    return asyncio.run(ask())


def test_the_page_gets_the_reports_of_all_agents(world: World, tmp_path: Path) -> None:
    port = world.leader()
    pods = {one["metadata"]["uid"] for one in world.job.cluster.get("pods")["items"]}

    def steps() -> list[int]:
        found, problem = asked(world, tmp_path, port)
        assert problem == ""
        assert set(found) <= pods
        assert all(one.state is AgentState.RUNNING for one in found.values())
        watches = [watch for one in found.values() for watch in one.watch]
        assert all(0.0 < one.metrics["loss"] <= 1.0 for one in watches if one.step)
        return sorted(one.step or 0 for one in watches)

    wait_until(lambda: len(steps()) == 4 and steps()[0] > 0)
    first = steps()
    wait_until(lambda: steps()[0] > first[-1])


def test_only_the_account_of_the_page_may_ask(world: World) -> None:
    port = world.leader()
    for authorization in (
        "",
        "Bearer ",
        "Bearer x",
        f"Bearer {'x' * 100_000}",
        f"Bearer {world.api.cluster.token}",  # an administrator, who can read everything elsewhere
        f"Bearer {world.token(READER)}",  # the right account, and a token for the Kubernetes API
        f"Bearer {world.token(READER, 'another-audience')}",
        f"Bearer {world.token('another', AUDIENCE)}",
        f"Bearer {world.token(READER, AUDIENCE, namespace='kube-system')}",
        f"Basic {world.token(READER, AUDIENCE)}",
        f"Bearer {world.token(READER, AUDIENCE)[:-3]}AAA",
    ):
        status = world.status(port, authorization)
        assert status in (400, 401), (authorization[:40], status)
    assert world.status(port, f"Bearer {world.token(READER, AUDIENCE)}") == 200
    assert world.status(port, f"Bearer {world.token(READER, AUDIENCE, 'another')}") == 200


def test_a_token_of_this_audience_is_of_no_use_at_the_kubernetes_api(world: World) -> None:
    server, token = world.api.cluster, world.token(READER, AUDIENCE)
    with closing(Api(replace(server, token=token))) as api:
        assert api.get("/api/v1/pods").code == 401


def test_a_job_that_the_operator_does_not_run_has_no_reports(world: World, tmp_path: Path) -> None:
    port = world.leader()
    for name in ("none", "..", "lm/../lm", "lm?x=1", "%2e%2e", "é", "a b"):
        assert asked(world, tmp_path, port, name) == ({}, "")


def test_a_replica_that_does_not_lead_says_so(world: World, tmp_path: Path) -> None:
    leader = world.leader()
    (other,) = (one for one in world.ports if one != leader)
    found, problem = asked(world, tmp_path, other)
    assert found == {}
    assert problem.startswith(MISSING)
    assert "this replica does not lead" in problem


def test_no_operator_costs_the_page_nothing_but_the_ranks(world: World, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    found, problem = asked(world, tmp_path, port)
    assert (found, problem[: len(MISSING)]) == ({}, MISSING)
    assert "no operator answers" in problem
    found, problem = asked(world, tmp_path, port, host="no-such-host.invalid")
    assert found == {}
    assert problem.startswith(MISSING)


def signed_in(browser: http.client.HTTPConnection, token: str) -> str:
    """Sign in to a page; the cookie."""
    headers = {"Origin": f"http://{browser.host}:{browser.port}", "Content-Type": FORM}
    browser.request("POST", "/", f"token={token}&namespaces=default", headers)
    answer = browser.getresponse()
    assert (answer.status, answer.read()) == (303, b"")
    return (answer.headers["Set-Cookie"] or "").partition(";")[0]


def test_a_person_sees_ranks_and_curves_on_the_page_of_the_cluster(
    world: World, tmp_path: Path
) -> None:
    token, server = tmp_path / "token", world.job.cluster
    token.write_text(world.token(READER, AUDIENCE))
    options = ("--kubeconfig", str(server.directory / "kubeconfig"), "--port", "0")
    operators = ("--operator", f"localhost:{world.leader()}", "--operator-token", str(token))
    cli = Cli(tmp_path / "none", tmp_path)
    process = cli.start("page-server", *options, *operators)
    try:
        (line,) = read_until(process, lambda line: "page is served" in line)
        place = line.partition("address=http://")[2].strip("/")
        with closing(http.client.HTTPConnection(place, timeout=PATIENCE_SECONDS)) as browser:

            def job(cookie: str) -> Any:
                browser.request("GET", "/api/page/jobs/default/lm", headers={"Cookie": cookie})
                return json.loads(browser.getresponse().read())

            limited, admin = (
                signed_in(browser, one) for one in (world.limited(), world.api.cluster.token)
            )
            assert job(limited)["heatMap"] is None
            found = job(admin)
            assert (found["unreached"], found["missing"], found["worldSize"]) == ("", [], 4)
            wait_until(lambda: job(admin)["heatMap"] is not None)
            found = job(admin)
            assert found["heatMap"]["ranks"] == 4
            assert [one["workers"] for one in found["pods"]] == [2, 2]
            assert all(step for step in found["heatMap"]["steps"])
            points = len(found["history"]["times"])
            assert points >= 1

            # Who may not list pods sees no ranks of them, and takes them from nobody else.
            def is_longer() -> bool:
                seen = job(limited)
                assert (seen["heatMap"], seen["pods"], seen["different"]) == (None, [], [])
                assert any("pods" in line for line in seen["missing"])
                assert job(admin)["heatMap"]["ranks"] == 4
                return len(seen["history"]["times"]) > points

            wait_until(is_longer)
            assert job(admin)["history"]["metricNames"] == ["loss"]
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert "ERROR" not in rest
    assert token.read_text() not in rest


def test_after_a_change_of_the_leader_the_other_one_answers(world: World, tmp_path: Path) -> None:
    first = world.leader()
    world.operators[world.ports.index(first)].kill()
    second = world.leader()
    assert second != first
    wait_until(lambda: len(asked(world, tmp_path, second)[0]) == 2)
    world.operators[world.ports.index(first)].restart()

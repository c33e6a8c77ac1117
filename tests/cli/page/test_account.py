"""`unbroken ui` on a real control plane, as a person who may read one namespace."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Api
from tests.apiservers import ROOT, Cluster, real_cluster
from tests.cli.test_cli_story import HUNG
from tests.cli_calls import Cli, assert_fits, read_until
from tests.job_samples import job
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.cli.page.actions import person_here
from unbroken.cli.page.entrance import KEY_HEADER
from unbroken.kube.client import connect
from unbroken.operator.definitions import install
from unbroken.spec.job.codec import incident_to

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

GUIDE = ROOT / "docs/guide/ui.md"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
INCIDENTS = "unbroken.dev/v1:incidents"
OWN, OTHER = "page-own", "page-other"
HOSTILE = "</script><img src=x onerror=alert(1)>"
NEEDED = ("hyperpodpytorchjobs", "incidents")


def rules_of_the_guide(name: str) -> list[dict[str, Any]]:
    """The rules of a ClusterRole that the guide shows."""
    found = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    roles = [yaml.safe_load(one) for one in found]
    (rules,) = (one["rules"] for one in roles if "rules" in one and one["metadata"]["name"] == name)
    return list(rules)


LOOKS, ACTS = (rules_of_the_guide(name) for name in ("unbroken-page", "unbroken-page-actions"))


@dataclass
class World:
    """A job with an incident in each of two namespaces, and accounts of the first one."""

    api: Api
    folder: Path

    def account(
        self,
        name: str,
        *rules: Mapping[str, Any],
        cluster_rules: Any = (),
        namespace: str = OWN,
    ) -> Path:
        """A kubeconfig with the token of an account that has these rights in its namespace."""
        api, account = self.api.within(namespace), {"kind": "ServiceAccount", "name": name}
        subjects = [{**account, "namespace": namespace}]
        api.post("serviceaccounts", {"metadata": {"name": name}}).done()
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        api.post("rbac.authorization.k8s.io/v1:roles", named(name, rules=[*rules])).done()
        bound = named(name, roleRef=role, subjects=subjects)
        api.post("rbac.authorization.k8s.io/v1:rolebindings", bound).done()
        if cluster_rules:
            self.api.post(f"{RBAC}/clusterroles", named(name, rules=[*cluster_rules])).done()
            bound = named(name, roleRef={**role, "kind": "ClusterRole"}, subjects=subjects)
            self.api.post(f"{RBAC}/clusterrolebindings", bound).done()
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = api.post(f"serviceaccounts/{name}/token", request).made["status"]["token"]
        return self.kubeconfig(name, token)

    def kubeconfig(self, name: str, token: str) -> Path:
        """A kubeconfig with this token, whose context has the first namespace."""
        place = yaml.safe_load(self.api.cluster.kubeconfig.read_text())
        place["users"][0]["user"] = {"token": token}
        place["contexts"][0]["context"]["namespace"] = OWN
        file = self.folder / f"{name}.kubeconfig"
        file.write_text(yaml.safe_dump(place))
        return file


def named(name: str, **content: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, **content}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        real_cluster(tmp_path_factory.mktemp("plane")) as cluster,
        closing(Api(cluster)) as api,
    ):
        asyncio.run(define(cluster))
        for namespace in (OWN, OTHER):
            api.post("/api/v1/namespaces", named(namespace)).done()
            inside, name = api.within(namespace), f"job-of-{namespace}"
            made = inside.post(JOBS, {**job(), "metadata": {"name": name}}).made
            culprit = replace(HUNG.culprit, text=HOSTILE, evidence=(HOSTILE,))
            incident = incident_to(replace(HUNG, culprit=culprit, signals=()), made["metadata"])
            inside.post(INCIDENTS, incident).done()
            labels = {"HPJob": name}
            pod = {"containers": [{"name": "a", "image": "a"}]}
            inside.post("pods", {"metadata": {"name": name, "labels": labels}, "spec": pod}).done()
        yield World(api, tmp_path_factory.mktemp("accounts"))


async def define(cluster: Cluster) -> None:
    """Install the definitions of jobs and incidents."""
    async with connect(cluster.kubeconfig) as client:
        await install(client)


@dataclass
class Visitor:
    """A browser, which keeps all that it has received."""

    link: str
    pid: int
    received: str = ""
    cookie: str = ""
    key: str = ""

    def open(self) -> None:
        """Exchange the link for a cookie and a key."""
        self.get("/?" + self.link.partition("?")[2], 303)
        self.cookie = self.received.partition("Set-Cookie: ")[2].partition(";")[0]
        self.key = self.received.partition("#key=")[2].partition("\n")[0].strip()

    def get(self, path: str, status: int = 200) -> str:
        """The body of an answer, which must have this status."""
        found, body = self.ask(path)
        assert found == status, body
        return body

    def ask(self, path: str, order: dict[str, Any] | None = None) -> tuple[int, str]:
        """Status and body of an answer; with an order, to that."""
        place = self.link.partition("//")[2].partition("/")[0]
        headers, method = {"Cookie": self.cookie}, "GET"
        if order is not None:
            own = {"Origin": f"http://{place}", "Content-Type": "application/json"}
            headers, method = {**headers, **own, KEY_HEADER: self.key}, "POST"
        with closing(http.client.HTTPConnection(place, timeout=PATIENCE_SECONDS)) as connection:
            connection.request(method, path, None if order is None else json.dumps(order), headers)
            answer = connection.getresponse()
            body = answer.read().decode()
        self.received += f"{answer.headers}{body}"
        return answer.status, body

    def act(self, action: str, namespace: str, name: str) -> tuple[int, str]:
        """Status and result, or problem, of an order about a job."""
        order = {"action": action, "namespace": namespace, "name": name}
        status, body = self.ask("/api/orders", order)
        value = json.loads(body)
        return status, value.get("result") or value["problem"]

    def offers(self, namespace: str) -> list[str]:
        """The actions that are offered for jobs of a namespace."""
        return [
            one["action"] for one in self.page(f"actions/jobs/{namespace}", "actions")["actions"]
        ]

    def refusal(self, path: str) -> str:
        """The problem of a page once the API server refuses it.

        A change of rights reaches the API server's authorizer a moment later, and contents are kept
        for at least a second.
        """
        found: list[str] = []

        def is_refused() -> bool:
            status, body = self.ask(f"/api/page/{path}")
            found[:] = [json.loads(body).get("problem", "")]
            return status == 403

        wait_until(is_refused)
        return found[0]

    def page(self, path: str, *schema: str) -> dict[str, Any]:
        """The contents of a page, which must fit their schema."""
        found: dict[str, Any] = json.loads(self.get(f"/api/page/{path}"))
        assert_fits(found, ["page", *schema])
        return found


@contextmanager
def visited(cli: Cli, file: Path, *options: str) -> Iterator[Visitor]:
    """`unbroken ui` with a kubeconfig, and a browser; its token must appear nowhere."""
    token = yaml.safe_load(file.read_text())["users"][0]["user"]["token"]
    process = cli.start("ui", "--kubeconfig", str(file), *options)
    try:
        said = read_until(process, lambda line: "?link=" in line)
        visitor = Visitor(said[-1], process.pid)
        visitor.open()
        yield visitor
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, rest
    everything = "\n".join([*said, rest, shown, visitor.received])
    assert token not in everything
    assert "Traceback" not in everything


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command of a person without a local cluster."""
    return Cli(tmp_path / "none", tmp_path)


def test_a_person_sees_the_jobs_of_the_own_namespace_and_no_others(world: World, cli: Cli) -> None:
    file = world.account("ann", *LOOKS)
    with visited(cli, file) as ann:
        page = ann.page("jobs", "jobs")
        assert [one["name"] for one in page["jobs"]] == [f"job-of-{OWN}"]
        (line,) = page["missing"]
        assert "may not list all namespaces" in line
        assert "agents of local clusters only" in page["unreached"]

        mine = ann.page(f"jobs/{OWN}/job-of-{OWN}", "job")
        assert [one["name"] for one in mine["pods"]] == [f"job-of-{OWN}"]
        assert (mine["incidentCount"], mine["heatMap"]) == (1, None)
        assert mine["missing"] == []
        assert mine["unreached"]
        incident = ann.page(f"jobs/{OWN}/job-of-{OWN}/incidents/2", "incident")
        assert incident["what"] == HOSTILE
        story = ann.get(f"/api/text/jobs/{OWN}/job-of-{OWN}/incidents/2")
        assert "rank 3" in story

        for path in (f"jobs/{OTHER}/job-of-{OTHER}", f"jobs/{OTHER}/job-of-{OTHER}/incidents/2"):
            refused = ann.get(f"/api/page/{path}", 403)
            text = f"your account may not read job job-of-{OTHER} in namespace {OTHER}"
            assert json.loads(refused)["problem"] == text
        ann.get(f"/api/text/jobs/{OTHER}/job-of-{OTHER}/incidents/2", 403)
        nodes = ann.page("nodes", "nodes")
        assert nodes["nodes"] == []
        assert any("nodes" in line and "noderecords" in line for line in nodes["missing"])
        assert HOSTILE not in ann.get("/")


def test_a_person_acts_where_kubernetes_lets_the_account(world: World, cli: Cli) -> None:
    file = world.account("kim", *LOOKS, *ACTS)
    name, inside = f"job-of-{OWN}", world.api.within(OWN)
    with visited(cli, file) as kim:
        assert kim.offers(OWN) == ["restart", "suspend", "resume", "detector"]
        assert kim.offers(OTHER) == []
        assert kim.act("suspend", OWN, name) == (200, f"{name}: suspended")
        assert inside.get(f"{JOBS}/{name}").made["spec"]["runPolicy"]["suspend"] is True
        assert kim.act("resume", OWN, name) == (200, f"{name}: resumed")
        assert inside.get(f"{JOBS}/{name}").made["spec"]["runPolicy"]["suspend"] is False
        assert kim.act("restart", OWN, name) == (200, f"{name}: restart requested")
        assert (
            "unbroken.dev/restart" in inside.get(f"{JOBS}/{name}").made["metadata"]["annotations"]
        )
        events = [
            one for one in inside.get("events").made["items"] if one["reason"] == "ActionOnPage"
        ]
        by = " on the live page by "
        assert {one["message"].partition(by)[0] for one in events} == {
            *("suspended", "resumed", "restart requested")
        }
        who = {one["message"].partition(by)[2] for one in events}
        told = world.api.minor >= 28
        assert who == {f"system:serviceaccount:{OWN}:kim" if told else person_here()}
        shown = kim.page(f"jobs/{OWN}/{name}", "job")["events"]
        assert "ActionOnPage" in {one["reason"] for one in shown}
        status, text = kim.act("restart", OTHER, f"job-of-{OTHER}")
        assert status == 403
        assert f"may not read job job-of-{OTHER} in namespace {OTHER}" in text
        assert kim.act("restart", OWN, "none")[0] == 409

        seen = kim.page(f"jobs/{OWN}/{name}", "job")["uid"]
        order = {"action": "suspend", "namespace": OWN, "name": name}
        assert kim.ask("/api/orders", {**order, "uid": seen})[0] == 200
        for action in ("resume", "restart"):
            status, text = kim.ask("/api/orders", {**order, "action": action, "uid": "another"})
            assert (status, "another job has the name" in text) == (409, True)
        assert inside.get(f"{JOBS}/{name}").made["spec"]["runPolicy"]["suspend"] is True

    with visited(cli, world.account("lea", *LOOKS)) as lea:
        assert lea.offers(OWN) == []
        status, text = lea.act("restart", OWN, name)
        assert status == 403
        assert re.search(r"lea.* cannot patch resource", text)
    silent = world.account("mia", *LOOKS, ACTS[0])
    with visited(cli, silent) as mia:
        status, text = mia.act("restart", OWN, name)
        assert status == 200, "the action was taken, though nothing tells of it"
        assert "no event tells of it" in text


def test_nodes_are_changed_by_an_account_that_may(world: World, cli: Cli) -> None:
    world.api.post("nodes", named("page-node")).done()
    record = {"kind": "NodeRecord", "apiVersion": "unbroken.dev/v1", **named("page-node", spec={})}
    world.api.post("unbroken.dev/v1:noderecords", record).done()
    node = {"name": "page-node"}

    def read() -> dict[str, Any]:
        found: dict[str, Any] = world.api.get("nodes/page-node").made
        return found

    with visited(cli, world.kubeconfig("operator", world.api.cluster.token)) as admin:
        offered = admin.page("actions/nodes", "actions")["actions"]
        names = [one["action"] for one in offered]
        assert names == ["drain", "uncordon", "reset", "reboot", "replace", "clear"]
        assert "All data on their disks is lost" in offered[4]["words"]
        for action, more, result in (
            ("drain", {"deadline": "soon"}, "--deadline soon: must be a number"),
            ("drain", {}, "page-node: drain begun"),
            ("reset", {}, "page-node: reset ordered"),
            ("clear", {"why": "cable replaced"}, "page-node: blame cleared (cable replaced)"),
        ):
            _, body = admin.ask("/api/orders", {"action": action, **node, **more})
            value = json.loads(body)
            assert result in (value.get("result") or value["problem"])
        assert read()["spec"]["unschedulable"] is True
        assert read()["metadata"]["annotations"]["unbroken.dev/repair"] == "reset"
        admin.ask("/api/orders", {"action": "uncordon", **node})
        assert "unschedulable" not in read()["spec"]
        cleared = world.api.get("unbroken.dev/v1:noderecords/page-node").made["spec"]["clearedBy"]
        assert cleared.endswith(" on the live page: cable replaced")
        events = world.api.within("default").get("events").made["items"]
        told = [one["message"] for one in events if one["involvedObject"]["name"] == "page-node"]
        assert len([one for one in told if " on the live page by " in one]) == 4
        status, body = admin.ask("/api/orders", {"action": "reset", "name": "none"})
        assert (status, json.loads(body)["problem"]) == (409, 'no node "none"; see: unbroken nodes')
    with visited(cli, world.account("noa", *LOOKS, *ACTS)) as noa:
        assert noa.page("actions/nodes", "actions")["actions"] == []
        status, body = noa.ask("/api/orders", {"action": "drain", **node})
        assert status == 403
        assert "may not read node page-node" in json.loads(body)["problem"]


def test_namespaces_and_kinds_that_are_refused_are_named(world: World, cli: Cli) -> None:
    groups = ["sagemaker.amazonaws.com", "unbroken.dev"]
    rules = {"apiGroups": groups, "resources": [*NEEDED], "verbs": ["get", "list"]}
    everywhere = {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list"]}
    file = world.account("bob", rules, cluster_rules=[everywhere])
    with visited(cli, file) as bob:
        page = bob.page("jobs", "jobs")
        assert [one["namespace"] for one in page["jobs"]] == [OWN]
        assert any("Not shown" in line and OTHER in line for line in page["missing"])
        mine = bob.page(f"jobs/{OWN}/job-of-{OWN}", "job")
        assert mine["pods"] == []
        (line,) = (one for one in mine["missing"] if "pods" in one)
        assert f"in namespace {OWN}" in line
        assert "events" in line


def test_a_right_that_is_taken_away_is_missed_at_once(world: World, cli: Cli) -> None:
    file = world.account("eve", *LOOKS)
    binding = "rbac.authorization.k8s.io/v1:rolebindings/eve"
    with visited(cli, file) as eve:
        for path in ("jobs", f"jobs/{OWN}/job-of-{OWN}"):
            eve.page(path)
        world.api.within(OWN).delete(binding).done()
        for path in ("jobs", f"jobs/{OWN}/job-of-{OWN}"):
            problem = eve.refusal(path)
            assert problem.startswith("your account may not")
            assert problem.endswith(f"in namespace {OWN}")


def test_a_namespace_of_the_address_is_one_part_of_a_path(world: World, cli: Cli) -> None:
    file = world.kubeconfig("any", world.api.cluster.token)
    with visited(cli, file) as admin:
        for namespace in ("..", "%2e%2e", f"{OWN}%3fwatch=1", f"{OWN}%23", "a%00", "%c3%a9"):
            status, body = admin.ask(f"/api/page/jobs/{namespace}/job-of-{OWN}")
            assert status in (403, 404, 503), (namespace, body)
            assert json.loads(body)["problem"]


def test_an_administrator_sees_everything_or_the_namespaces_that_are_named(
    world: World, cli: Cli
) -> None:
    file = world.kubeconfig("admin", world.api.cluster.token)
    with visited(cli, file) as admin:
        page = admin.page("jobs", "jobs")
        assert {OWN, OTHER} <= {one["namespace"] for one in page["jobs"]}
        assert page["missing"] == []
    with visited(cli, file, "-n", OTHER) as admin:
        assert [one["namespace"] for one in admin.page("jobs", "jobs")["jobs"]] == [OTHER]


@pytest.mark.parametrize(
    ("rules", "token", "options", "reason"),
    [
        ((), None, (), f"this account may not list .* in namespace {OWN}: name a namespace"),
        ((), None, ("-n", "a", "-n", "b"), "in namespaces a, b"),
        (("pods",), None, (), "this account may not list hyperpodpytorchjobs and incidents"),
        (("hyperpodpytorchjobs",), None, (), "this account may not list"),
        ((), "no-such-token", (), "Unauthorized"),
    ],
    ids=["nothing", "named", "pods", "jobs", "token"],
)
def test_an_account_that_sees_no_job_is_told_so_in_a_line(
    world: World,
    cli: Cli,
    request: pytest.FixtureRequest,
    rules: tuple[str, ...],
    token: str | None,
    options: tuple[str, ...],
    reason: str,
) -> None:
    name = request.node.callspec.id
    given = {"apiGroups": ["*"], "resources": [*rules] or ["secrets"], "verbs": ["list"]}
    file = world.kubeconfig(name, token) if token else world.account(name, given)
    done = cli.call("ui", "--kubeconfig", str(file), *options, code=1)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert re.search(reason, done.stderr)
    assert yaml.safe_load(file.read_text())["users"][0]["user"]["token"] not in done.stderr

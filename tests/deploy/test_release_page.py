"""The live page as the chart installs it, on a real API server with its accounts and rights."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import yaml

from tests.apiservers import free_ports
from tests.cluster_logs import assert_no_errors
from tests.deploy.charts import NAMESPACE, Object, arguments, render
from tests.deploy.planes import Plane, ended
from tests.deploy.rights import granted, refused, used
from tests.e2e.clusters import UNBROKEN
from tests.operator.trained_jobs import until
from tests.watching import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

OPERATOR, PAGE = "unbroken-operator", "unbroken-page"
VALUES: Object = {
    "page": {"enabled": True},
    "metrics": {"enabled": False},
    "webhook": {"enabled": False},
    "nodes": {"enabled": False},
    "nodeDaemon": {"enabled": False},
}
FORM = "application/x-www-form-urlencoded"


@contextmanager
def started(plane: Plane, account: str, words: list[str], said: str) -> Iterator[Path]:
    """Run a program with the token of its ServiceAccount, until it has said a text; its log."""
    kubeconfig, log = plane.account(account), plane.folder / f"{account}.log"
    with log.open("wb") as output:
        command = [*UNBROKEN, *words, "--kubeconfig", str(kubeconfig)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: said in log.read_text(), f"{account}: {said}")
        yield log
    finally:
        assert ended(process) == 0, log.read_text()[-3000:]
        assert_no_errors(log)


def without(words: list[str], *options: str) -> list[str]:
    """The arguments without these options."""
    return [one for one in words if one.partition("=")[0] not in options]


def test_the_page_of_the_chart_has_the_rights_that_it_needs_and_no_others(plane: Plane) -> None:
    found = render(VALUES)
    plane.install(VALUES)
    reports, page = free_ports(2)
    token = plane.folder / "token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    request["spec"] = {"audiences": ["unbroken-reports"]}  # type: ignore[assignment]
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{PAGE}/token"
    token.write_text(plane.api.post(path, request).made["status"]["token"])
    key = plane.folder / "key"
    key.write_text("0" * 64)
    key.chmod(0o440)
    with ExitStack() as stack:
        words = without(arguments(found), "--reports-port", "--reports-host", "--key-file")
        words += [f"--reports-port={reports}", f"--key-file={key}"]
        stack.enter_context(started(plane, OPERATOR, words, "operator runs"))
        words = without(
            arguments(found, PAGE), "--host", "--port", "--operator", "--operator-token"
        )
        words += [f"--port={page}", f"--operator=localhost:{reports}", f"--operator-token={token}"]
        log = stack.enter_context(started(plane, PAGE, words, "page is served"))

        body = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": "lm"},
            "spec": {
                "nprocPerNode": "1",
                "replicaSpecs": [
                    {
                        "name": "pods",
                        "replicas": 1,
                        "template": {"spec": {"containers": [{"name": "a", "image": "a"}]}},
                    }
                ],
            },
        }
        jobs = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
        plane.api.post(jobs, body).done()
        person = yaml.safe_load(plane.cluster.kubeconfig.read_text())["users"][0]["user"]["token"]
        with closing(
            http.client.HTTPConnection("127.0.0.1", page, timeout=PATIENCE_SECONDS)
        ) as browser:
            headers = {"Origin": f"http://127.0.0.1:{page}", "Content-Type": FORM}
            browser.request("POST", "/", f"token={person}", headers)
            answer = browser.getresponse()
            answer.read()
            cookie = (answer.headers["Set-Cookie"] or "").partition(";")[0]

            def shown() -> Object:
                browser.request("GET", "/api/page/jobs/default/lm", headers={"Cookie": cookie})
                found: Object = json.loads(browser.getresponse().read())
                return found

            until(lambda: shown().get("pods"), "the page shows the pod of the job")
            assert shown()["unreached"] == "", "an operator answers"
            review = {("tokenreviews.authentication.k8s.io", "create")}
            # The page asks the operator in its turn, soon after it has shown what it knew.
            until(
                lambda: shown() and used(plane.audited(f"{NAMESPACE}:{OPERATOR}"), review),
                "the operator has the page's token reviewed",
            )
        assert refused(plane.audited(f"{NAMESPACE}:{PAGE}")) == []
        known = granted(found, PAGE)
        until(lambda: used(plane.audited(f"{NAMESPACE}:{PAGE}"), known) == known, "rights are used")
        assert person not in log.read_text()

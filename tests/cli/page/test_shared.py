"""`unbroken page-server` on a real control plane: people of different rights, and hostile ones."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import yaml

from tests.cli.page.test_account import (
    ACTS,
    HOSTILE,
    JOBS,
    LOOKS,
    OTHER,
    OWN,
    World,
)
from tests.cli.page.test_account import world as world
from tests.cli_calls import Cli, assert_fits, read_until
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

NAME = "page.example.com"
FORM = "application/x-www-form-urlencoded"
TOKENS = "authentication.k8s.io"


def token_of(file: Path) -> str:
    """The token of a kubeconfig."""
    return str(yaml.safe_load(file.read_text())["users"][0]["user"]["token"])


@dataclass
class Shared:
    """A running page, and all that it has said."""

    world: World
    place: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def person(self, name: str, *rules: Mapping[str, Any], namespace: str = OWN) -> str:
        """The token of a new account with these rights in a namespace; none: those of the guide."""
        rules = rules or tuple(LOOKS)
        file = self.world.account(name, *rules, namespace=namespace)
        return token_of(file)


@dataclass
class Browser:
    """A browser at one of the page's host names."""

    page: Shared
    host: str = ""
    cookie: str = ""
    received: str = ""

    def ask(
        self, method: str, path: str, body: str = "", headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, body and headers of an answer."""
        host = self.host or self.page.place
        sent = {"Host": host, "Cookie": self.cookie, **(headers or {})}
        with closing(self._connection()) as connection:
            connection.request(method, path, body=body or None, headers=sent)
            answer = connection.getresponse()
            text = answer.read().decode()
        self.received += f"{answer.headers}{text}"
        return answer.status, text, answer.headers

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.page.place, timeout=PATIENCE_SECONDS)

    def post(
        self, path: str, body: str, kind: str = FORM, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Post as a page of this server does."""
        host = self.host or self.page.place
        origin = f"{'https' if self.host else 'http'}://{host}"
        given = {"Origin": origin, "Content-Type": kind, **headers}
        return self.ask("POST", path, body, {k: v for k, v in given.items() if v})

    def sign_in(self, token: str, namespaces: str = OWN, path: str = "/", **headers: str) -> int:
        """Send the form; keep the cookie."""
        body = f"token={quote_plus(token)}&namespaces={quote_plus(namespaces)}"
        status, text, answer = self.post(path, body, **headers)
        assert token not in text or len(token) < 5
        self.cookie = (answer["Set-Cookie"] or self.cookie).partition(";")[0]
        return status

    def page_of(self, path: str, *schema: str) -> dict[str, Any]:
        """The contents of a page, which must fit their schema."""
        status, body, _ = self.ask("GET", f"/api/page/{path}")
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        assert_fits(found, ["page", *schema])
        return found

    def status(self, path: str, **headers: str) -> int:
        """Status of an answer to GET."""
        return self.ask("GET", path, headers=headers)[0]

    @contextmanager
    def stream(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """An open stream."""
        with closing(self._connection()) as connection:
            headers = {"Host": self.host or self.page.place, "Cookie": self.cookie}
            connection.request("GET", f"/api/stream/{path}", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200
            yield answer


def until_line(answer: http.client.HTTPResponse, mark: bytes) -> bytes:
    """The first line with a mark; an assertion if the stream ends before."""
    while line := answer.readline():
        if mark in line:
            return line
    raise AssertionError(f"the stream ended without {mark!r}")


@pytest.fixture(scope="module")
def page(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    cli = Cli(folder / "none", folder)
    listing = {"apiGroups": ["sagemaker.amazonaws.com"], "resources": ["*"], "verbs": ["list"]}
    review = {"apiGroups": [TOKENS], "resources": ["tokenreviews"], "verbs": ["create"]}
    file = world.account("page", cluster_rules=[listing, review])
    options = ("--kubeconfig", str(file), "--port", "0", "--name", NAME)
    process = cli.start("page-server", *options)
    try:
        said = read_until(process, lambda line: "address=" in line)
        place = said[-1].partition("address=http://")[2].strip().removesuffix("/")
        yield Shared(world, place, process, said)
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
    assert "ERROR" not in rest
    assert "eyJ" not in rest, "the log has a token"


def test_each_person_sees_what_the_own_account_may_read(page: Shared) -> None:
    ann, bob = Browser(page), Browser(page)
    assert ann.sign_in(page.person("ann")) == 303
    assert bob.sign_in(page.person("bob", namespace=OTHER), OTHER) == 303
    for person, mine, others in ((ann, OWN, OTHER), (bob, OTHER, OWN), (ann, OWN, OTHER)):
        assert [one["namespace"] for one in person.page_of("jobs", "jobs")["jobs"]] == [mine]
        own = person.page_of(f"jobs/{mine}/job-of-{mine}", "job")
        assert [one["name"] for one in own["pods"]] == [f"job-of-{mine}"]
        incident = person.page_of(f"jobs/{mine}/job-of-{mine}/incidents/2", "incident")
        assert incident["what"] == HOSTILE
        for path in (
            f"page/jobs/{others}/job-of-{others}",
            f"page/jobs/{others}/job-of-{others}/incidents/2",
            f"text/jobs/{others}/job-of-{others}/incidents/2",
        ):
            assert person.status(f"/api/{path}") == 403
        nodes = person.page_of("nodes", "nodes")
        assert nodes["nodes"] == []
        assert any("nodes" in line for line in nodes["missing"])
        index = person.ask("GET", "/jobs")[1]
        assert f'data-person="system:serviceaccount:{mine}:' in index


def test_a_part_of_an_address_leads_nowhere_else(page: Shared) -> None:
    eve = Browser(page)
    eve.sign_in(page.person("eve"))
    for namespace in ("..", "%2e%2e", f"{OTHER}%2f..%2f{OWN}", f"{OTHER}%3fx=1", f"{OTHER}%23"):
        for name in (f"job-of-{OTHER}", "..", f"..%2f..%2f{OTHER}%2fhyperpodpytorchjobs"):
            status, body, _ = eve.ask("GET", f"/api/page/jobs/{namespace}/{name}")
            assert status in (403, 404, 503), (namespace, name, body)
            assert json.loads(body)["problem"]
    for name in (f"..%2f..%2f{OTHER}%2fhyperpodpytorchjobs%2fjob-of-{OTHER}", "a%00", "%c3%a9"):
        assert eve.status(f"/api/page/jobs/{OWN}/{name}") in (403, 404, 503)
    many = " ".join(f"n{number}" for number in range(21))
    for namespaces in ("../x", "a/b", "A", f"{OWN}?x", "a" * 64, many):
        assert Browser(page).sign_in(page.person(f"e{len(namespaces)}"), namespaces) == 403


def test_rights_that_are_taken_away_end_what_a_stream_shows(page: Shared) -> None:
    dan = Browser(page)
    dan.sign_in(page.person("dan"))
    with dan.stream(f"jobs/{OWN}/job-of-{OWN}") as stream:
        until_line(stream, b"event: contents")
        page.world.api.within(OWN).delete("rbac.authorization.k8s.io/v1:rolebindings/dan").done()
        until_line(stream, b"event: problem")
        assert b"your account may not" in until_line(stream, b"data: ")
    wait_until(lambda: dan.status("/api/page/jobs") in (403, 404))


def test_a_token_that_ends_ends_its_sessions_and_streams(page: Shared) -> None:
    fay = Browser(page)
    fay.sign_in(page.person("fay"))
    with fay.stream("jobs") as stream:
        until_line(stream, b"event: contents")
        page.world.api.within(OWN).delete("serviceaccounts/fay").done()
        while stream.readline():
            pass  # until the server ends it
    assert fay.status("/api/page/jobs") == 401
    status, body, _ = fay.ask("GET", f"/jobs/{OWN}/job-of-{OWN}")
    assert status == 401
    assert "Sign in" in body


def test_what_is_no_valid_token_opens_nothing(page: Shared) -> None:
    good = page.person("gus")
    for token in ("", " ", "x", "a b", "é", "a\nb", "x" * 20_000, good[:-4] + "AAAA", good + "x"):
        person = Browser(page)
        assert person.sign_in(token) == 403, token[:20]
        assert person.cookie == ""
        assert person.status("/api/page/jobs") == 401
    accounts = page.world.api.within(OWN)
    other = {"apiVersion": f"{TOKENS}/v1", "kind": "TokenRequest", "spec": {"audiences": ["x"]}}
    made = accounts.post("serviceaccounts/gus/token", other).made["status"]["token"]
    assert Browser(page).sign_in(made) == 403
    nothing = Browser(page)
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    assert nothing.sign_in(page.person("hal", secrets)) == 403
    assert "may not list hyperpodpytorchjobs" in nothing.received
    assert Browser(page).post("/", "token=" + "x" * 30_000)[0] == 413
    assert Browser(page).post("/", f"token={good}", "text/plain")[0] == 415
    assert Browser(page).post("/", "&".join(f"a{i}=b" for i in range(9)))[0] == 400


def test_a_session_is_made_by_the_server_and_ends_by_signing_out(page: Shared) -> None:
    token = page.person("ivy")
    fixed = "unbroken-page=" + "A" * 43
    ivy = Browser(page, cookie=fixed)
    assert ivy.status("/api/page/jobs") == 401
    ivy.sign_in(token)
    assert ivy.cookie != fixed
    assert Browser(page, cookie=fixed).status("/api/page/jobs") == 401
    again = Browser(page)
    again.sign_in(token)
    assert again.cookie != ivy.cookie
    with ivy.stream("jobs") as stream:
        until_line(stream, b"event: contents")
        assert ivy.post("/signout", "")[0] == 204
        while stream.readline():
            pass
    assert ivy.status("/api/page/jobs") == 401
    assert again.status("/api/page/jobs") == 200


def test_another_site_can_neither_sign_in_nor_out_nor_read(page: Shared) -> None:
    token = page.person("jon")
    jon = Browser(page)
    jon.sign_in(token)
    own = f"http://{page.place}"
    for headers in (
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": f"http://{page.place}.evil.example"},
        {"Origin": f"http://{page.place.partition(':')[0]}:1"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        {"Origin": own, "Sec-Fetch-Site": "same-site"},
    ):
        victim = Browser(page)
        assert victim.sign_in(token, **headers) == 403
        assert victim.cookie == ""
        assert jon.post("/signout", "", **headers)[0] == 403
    assert jon.status("/api/page/jobs") == 200
    assert jon.status("/api/page/jobs", **{"Sec-Fetch-Site": "cross-site"}) == 403
    form = Browser(page).ask("GET", "/jobs")[2]
    assert "frame-ancestors 'none'" in form["Content-Security-Policy"]
    assert "script-src" not in form["Content-Security-Policy"]


def test_a_form_leads_to_a_page_of_this_server_alone(page: Shared) -> None:
    token = page.person("kim")
    for path, place in (
        (f"/jobs/{OWN}/job-of-{OWN}", f"/jobs/{OWN}/job-of-{OWN}"),
        ("//evil.example/jobs", "/"),
        ("/jobs//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/jobs/%0d%0aSet-Cookie:a=b", "/"),
        ("/jobs?next=//evil.example", "/jobs"),
    ):
        kim = Browser(page)
        body = f"token={quote_plus(token)}&namespaces={OWN}"
        status, _, headers = kim.post(path, body)
        assert (status, headers["Location"]) == (303, place)


def test_headers_of_a_proxy_and_of_impersonation_are_not_heard(page: Shared) -> None:
    lea = Browser(page)
    lea.sign_in(page.person("lea"))
    admin = page.world.api.cluster.token
    smuggled = {
        "Authorization": f"Bearer {admin}",
        "Impersonate-User": "admin",
        "Impersonate-Group": "system:masters",
        "X-Remote-User": "admin",
        "X-Remote-Group": "system:masters",
        "X-Forwarded-User": "admin",
        "X-Forwarded-Host": NAME,
        "X-Forwarded-Proto": "https",
    }
    path = f"/api/page/jobs/{OTHER}/job-of-{OTHER}"
    assert lea.status(path, **smuggled) == 403
    assert Browser(page).status(path, **smuggled) == 401
    assert Browser(page).status("/api/page/jobs", Cookie=f"unbroken-page={admin}") == 401


def test_the_cookie_of_tls_is_of_its_own_host(page: Shared) -> None:
    token = page.person("max")
    far, near = Browser(page, NAME), Browser(page)
    body = f"token={quote_plus(token)}&namespaces={OWN}"
    cookies = [one.post("/", body)[2]["Set-Cookie"] for one in (far, near)]
    assert cookies[0].startswith("__Host-unbroken-page=")
    for part in ("Secure", "HttpOnly", "SameSite=Lax", "Path=/"):
        assert part in cookies[0]
        assert (part in cookies[1]) is (part != "Secure")
    far.cookie, near.cookie = (one.partition(";")[0] for one in cookies)
    assert (far.status("/api/page/jobs"), near.status("/api/page/jobs")) == (200, 200)
    far.cookie, near.cookie = near.cookie, far.cookie
    assert (far.status("/api/page/jobs"), near.status("/api/page/jobs")) == (401, 401)
    for host in ("evil.example", f"{NAME}.evil.example", f"evil.{NAME}", "10.0.0.7:8090"):
        assert Browser(page, host).status("/") == 421
    assert Browser(page, "10.0.0.7:8090").ask("GET", "/healthz")[:2] == (200, "ok\n")


def test_actions_have_the_rights_of_the_person(page: Shared) -> None:
    order = json.dumps({"action": "suspend", "namespace": OWN, "name": f"job-of-{OWN}"})
    kind = "application/json"
    reader, owner, near = Browser(page, NAME), Browser(page, NAME), Browser(page)
    reader.sign_in(page.person("ned"))
    token = page.person("ole", *LOOKS, *ACTS)
    owner.sign_in(token)
    near.sign_in(token)
    assert reader.post("/api/orders", order, kind)[0] == 403
    assert near.post("/api/orders", order, kind)[0] == 403
    assert owner.post("/api/orders", order, kind, Origin="https://evil.example")[0] == 403
    job = page.world.api.within(OWN).get(f"{JOBS}/job-of-{OWN}").object
    assert not job["spec"].get("runPolicy", {}).get("suspend")
    status, body, _ = owner.post("/api/orders", order, kind)
    assert status == 200, body
    job = page.world.api.within(OWN).get(f"{JOBS}/job-of-{OWN}").object
    assert job["spec"]["runPolicy"]["suspend"] is True
    events = page.world.api.within(OWN).get("events").object["items"]
    assert any(f"system:serviceaccount:{OWN}:ole" in one["message"] for one in events)

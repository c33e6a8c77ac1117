"""A plain HTTP client that shows every detail of an API server's answers.

Paths are written short: `pods/a/status` is core/v1, `apps/v1:deployments/a` another group. Both are
in the namespace of the client if it has one. A path that starts with `/` is taken as it is.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.message import Message
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.apiservers import Cluster

Object = dict[str, Any]
SECONDS = 60
"""Seconds until an answer, or the next event of a watch, must have come.

The garbage collector of Kubernetes looks for new kinds of objects every 30 s
(`startGarbageCollectorController` in cmd/kube-controller-manager/app/core.go): only from then on it
deletes the pods of a deleted job.
"""
LARGE = 1 << 21
"""Bytes of a body that a server may refuse before it has read it."""
CHUNK = 1 << 14
PATCHES = {
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


class Answer:
    """The server's answer to one request."""

    def __init__(self, code: int, headers: Message, body: bytes) -> None:
        self.code = code
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"<{self.code} {self.body[:600].decode(errors='replace')}>"

    @property
    def object(self) -> Object:
        """Body as JSON."""
        decoded: Object = json.loads(self.body)
        return decoded

    def done(self) -> None:
        """Check that the request succeeded; the test fails with the whole answer if not."""
        assert 200 <= self.code < 300, self

    @property
    def made(self) -> Object:
        """Body of a success."""
        self.done()
        return self.object

    @property
    def reason(self) -> str | None:
        """Reason of a Status."""
        return self.object.get("reason")

    @property
    def message(self) -> str:
        """Message of a Status."""
        text: str = self.object["message"]
        return text

    @property
    def causes(self) -> set[tuple[str, str]]:
        """Pairs (reason, field) of every cause of a Status."""
        causes = self.object.get("details", {}).get("causes", [])
        return {(cause.get("reason", ""), cause.get("field", "")) for cause in causes}

    @property
    def is_put_off(self) -> bool:
        """True if the handlers of a custom resource are being replaced: 503, and when to retry."""
        return self.code == 503 and b"apiserver is shutting down" in self.body

    @property
    def failure(self) -> tuple[int, str | None]:
        """Code and reason, after a check that the body is a Status with the same code."""
        status = self.object
        assert (status["kind"], status["apiVersion"]) == ("Status", "v1"), self
        assert (status["status"], status["code"]) == ("Failure", self.code), self
        assert status["message"], self
        return self.code, status.get("reason")


class Watch:
    """An open watch."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def event(self) -> Object:
        """Wait for the next event."""
        line = self._response.readline()
        assert line, "the watch has ended"
        event: Object = json.loads(line)
        return event

    def events(self, count: int) -> list[tuple[str, str]]:
        """Wait for as many events; return (type, name) of each."""
        events = [self.event() for _ in range(count)]
        return [(event["type"], event["object"]["metadata"].get("name")) for event in events]

    def rest(self) -> list[Object]:
        """Return all events until the server ends the watch."""
        return [json.loads(line) for line in self._response]


class Api:
    """Requests to one cluster, in one namespace if one is given."""

    def __init__(self, cluster: Cluster, namespace: str | None = None) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._context = ssl.create_default_context(cadata=cluster.ca) if cluster.ca else None

    @property
    def minor(self) -> int:
        """Minor version of the server."""
        return self.cluster.minor

    def within(self, namespace: str) -> Api:
        """Return the same client for another namespace."""
        other = Api(self.cluster, namespace)
        other._idle = self._idle
        other._context = self._context
        return other

    def path(self, what: str) -> str:
        """Return the whole path of a short one."""
        if what.startswith("/"):
            return what
        group = re.match(r"([a-z0-9.-]+/v\w+):(.*)", what)
        start = f"/apis/{group[1]}" if group else "/api/v1"
        place = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"{start}{place}/{group[2] if group else what}"

    def send(
        self,
        method: str,
        what: str,
        body: object = None,
        content: str = "application/json",
        headers: dict[str, str] | None = None,
        query: Object | None = None,
    ) -> Answer:
        """Send one request. Bytes or text are sent as they are, other bodies as JSON.

        A kube-apiserver that has just changed a definition may ask to retry: then the request is
        repeated.
        """
        until = time.monotonic() + SECONDS
        while True:
            answer = self._send(method, what, body, content, headers or {}, query or {})
            if not answer.is_put_off or time.monotonic() > until:
                return answer
            time.sleep(float(answer.headers["Retry-After"]))

    def _send(
        self,
        method: str,
        what: str,
        body: object,
        content: str,
        headers: dict[str, str],
        query: Object,
    ) -> Answer:
        # deque's pop and append are atomic: many threads may share this client.
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        target, sent = self._request(what, body, content, query)
        try:
            if len(target[1] or b"") > LARGE:
                self._upload(connection, method, target, sent)
                sent["Connection"] = "close"
            else:
                connection.request(method, target[0], target[1], {**sent, **headers})
            response = connection.getresponse()
            answer = Answer(response.status, response.headers, response.read())
        except (http.client.HTTPException, OSError):
            connection.close()
            raise
        if response.will_close or "Connection" in sent:
            connection.close()
        else:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    def get(self, what: str, **query: object) -> Answer:
        """Send a GET, as JSON."""
        return self.send("GET", what, query=query)

    def post(self, what: str, body: object, **query: object) -> Answer:
        """Send a POST of JSON."""
        return self.send("POST", what, body, query=query)

    def put(self, what: str, body: object, **query: object) -> Answer:
        """Send a PUT of JSON."""
        return self.send("PUT", what, body, query=query)

    def patch(self, kind: str, what: str, body: object, **query: object) -> Answer:
        """Send a PATCH of a kind of `PATCHES`."""
        return self.send("PATCH", what, body, PATCHES[kind], query=query)

    def delete(self, what: str, options: Object | None = None, **query: object) -> Answer:
        """Send a DELETE, with DeleteOptions as the body if they are given."""
        return self.send("DELETE", what, options, query=query)

    def apply(
        self, what: str, body: object, manager: str = "one", force: bool = False, **query: object
    ) -> Answer:
        """Send a server-side apply."""
        if force:
            query["force"] = "true"
        return self.patch("apply", what, body, fieldManager=manager, **query)

    @contextmanager
    def watch(
        self, what: str, headers: dict[str, str] | None = None, **query: object
    ) -> Iterator[Watch]:
        """Open a watch on a connection of its own."""
        query = {"watch": "true", **query}
        with closing(self._connect()) as connection:
            target, sent = self._request(what, None, "", query)
            connection.request("GET", target[0], None, {**sent, **(headers or {})})
            response = connection.getresponse()
            assert response.status == 200, Answer(
                response.status, response.headers, response.read()
            )
            # The response keeps the socket open on its own account.
            with closing(response):
                yield Watch(response)

    def until(self, collection: str, name: str, holds: Callable[[Object], bool]) -> Object:
        """Wait until an object fits or is gone; return it, or {} if it was not there."""
        selector = f"metadata.name={name}"
        listed = self.get(collection, fieldSelector=selector).made
        found: Object = next(iter(listed["items"]), {})
        if not found or holds(found):
            return found
        if not listed["items"]:
            return {}  # it was gone before the first look
        version = listed["metadata"]["resourceVersion"]
        with self.watch(collection, fieldSelector=selector, resourceVersion=version) as events:
            while True:
                event = events.event()
                if event["type"] == "DELETED" or holds(event["object"]):
                    changed: Object = event["object"]
                    return changed

    def settled(self, request: Callable[[], Answer], lags: Callable[[Answer], bool]) -> Answer:
        """Return the answer of a server that has processed all earlier writes.

        kube-apiserver decides some things by copies that follow its store a moment late, on a busy
        machine a long one. Only its answers show the state of these copies. The embedded server
        keeps no copies: its first answer counts.
        """
        until = time.monotonic() + SECONDS
        while True:
            answer = request()
            if not self.cluster.is_real or not lags(answer) or time.monotonic() > until:
                return answer

    def _upload(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: tuple[str, bytes | None],
        headers: dict[str, str],
    ) -> None:
        """Send a large body until the server answers, perhaps before it has read the whole."""
        # One small request first: what TLS itself sends must not look like an answer.
        connection.request("GET", "/version", None, self.cluster.headers)
        connection.getresponse().read()
        body = target[1] or b""
        connection.putrequest(method, target[0])
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        for start in range(0, len(body), CHUNK):
            readable, _, _ = select.select([connection.sock], [connection.sock], [], SECONDS)
            if readable:
                return
            connection.send(body[start : start + CHUNK])

    def _connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self.cluster.url)
        assert place.hostname
        if self._context is None:
            return http.client.HTTPConnection(place.hostname, place.port, timeout=SECONDS)
        return http.client.HTTPSConnection(
            place.hostname, place.port, timeout=SECONDS, context=self._context
        )

    def _request(
        self, what: str, body: object, content: str, query: Object
    ) -> tuple[tuple[str, bytes | None], dict[str, str]]:
        headers = {**self.cluster.headers, "Accept": "application/json"}
        data: bytes | None = None
        if body is not None:
            headers["Content-Type"] = content
            data = body if isinstance(body, bytes) else None
            if data is None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
        target = self.path(what) + (f"?{urlencode(query)}" if query else "")
        return (target, data), headers

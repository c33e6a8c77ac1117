"""Record the answers in `recorded/` from a real API server.

python -m tests.local.apiserver.record_answers KUBECONFIG
"""

from __future__ import annotations

import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.local.apiserver.recorded_cases import FOLDER, NAMESPACE, Case, Object, cases
from unbroken.local.apiserver.kinds.builtin import BUILTINS

KINDS = {kind.resource: kind for kind in BUILTINS}
PASSING = ("Age", "Created At")
IDENTITY = ("kind", "apiVersion", "metadata")
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
YEARS = re.compile(r'"[0-9]+y([0-9]+d)?"')
"""Ages of old objects, which change from day to day."""
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
JSON = "application/json"
OLD = {"poddisruptionbudgets.policy", "endpointslices.discovery.k8s.io"}
"""Resources that v1.20 serves as v1beta1."""
CLUSTER = {
    "namespaces",
    "nodes",
    "persistentvolumes",
    "priorityclasses.scheduling.k8s.io",
    "storageclasses.storage.k8s.io",
    "clusterroles.rbac.authorization.k8s.io",
    "clusterrolebindings.rbac.authorization.k8s.io",
}


class Server:
    """Requests to the server of a kubeconfig with a token."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._url = config["clusters"][0]["cluster"]["server"]
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl._create_unverified_context()

    def ask(self, method: str, path: str, body: Any = None, form: str = JSON) -> Object:
        """Send a request; return the decoded answer, whatever its code."""
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Accept": form,
                "Content-Type": "application/merge-patch+json" if method == "PATCH" else JSON,
            },
        )
        try:
            with urllib.request.urlopen(request, context=self._context) as answer:
                decoded: Object = json.load(answer)
        except urllib.error.HTTPError as error:
            decoded = json.loads(error.read())
        return decoded


def path_of(resource: str) -> str:
    """Return the path of a resource's objects."""
    plural, _, group = resource.partition(".")
    version = "v1beta1" if resource in OLD else "v1"
    root = f"/apis/{group}/{version}" if group else "/api/v1"
    return f"{root}/{plural}" if resource in CLUSTER else f"{root}/namespaces/{NAMESPACE}/{plural}"


def whole(case: Case) -> Object:
    """Return the object with its apiVersion and kind."""
    kind = KINDS[case.resource]
    version = "v1beta1" if case.resource in OLD else "v1"
    return {"apiVersion": kind.api_version(version), "kind": kind.kind, **case.content}


def remove(server: Server, place: str) -> None:
    """Delete an object now, despite finalizers and grace periods."""
    server.ask("PATCH", place, {"metadata": {"finalizers": None}})
    server.ask("DELETE", f"{place}?gracePeriodSeconds=0&propagationPolicy=Background")


def refusal(server: Server, case: Case) -> Any:
    """Return the causes of a refusal, or its message without causes. None: it was no refusal."""
    path, content = path_of(case.resource), whole(case)
    if case.change is None:
        answer = server.ask("POST", f"{path}?dryRun=All", content)
    else:
        made = server.ask("POST", path, content)
        assert made["kind"] != "Status", (case, made)
        place = f"{path}/{content['metadata']['name']}"
        answer = server.ask("PATCH", f"{place}?dryRun=All", case.change)
        remove(server, place)
    if answer["kind"] != "Status":
        return None
    causes = (answer.get("details") or {}).get("causes")
    if not causes:
        return answer["message"]
    return sorted(
        [cause["reason"], cause.get("field", ""), shown(cause["message"])] for cause in causes
    )


def shown(message: str) -> str:
    """Return the first line, in which a value in Go's notation, with addresses, becomes VALUE."""
    message = message.split("\n", 1)[0]
    start, _, rest = message.partition(" value: ")
    if start not in ("Invalid", "Unsupported", "Duplicate") or rest[:1] in '"-0123456789':
        return message
    end = max(rest.rfind("}: "), rest.rfind("): "))
    return f"{start} value: VALUE" + (rest[end + 1 :] if end >= 0 else "")


def stored(server: Server, case: Case) -> Any:
    """Return the object as the server completes it, and the cells of its row in a table."""
    path, content = path_of(case.resource), whole(case)
    made = server.ask("POST", f"{path}?dryRun=All", content)
    assert made["kind"] != "Status", (case, made)
    if case.status is None:
        table = server.ask("POST", f"{path}?dryRun=All", content, TABLE)
    else:
        place = f"{path}/{content['metadata']['name']}"
        server.ask("POST", path, content)
        changed = server.ask("PATCH", f"{place}/status", {"status": case.status})
        assert changed["kind"] != "Status", (case, changed)
        table = server.ask("GET", place, form=TABLE)
        remove(server, place)
    titles = [column["name"] for column in table["columnDefinitions"]]
    cells = dict(zip(titles, table["rows"][0]["cells"], strict=True))
    found = {
        "cells": {name: cell for name, cell in cells.items() if name not in PASSING},
        "labels": made["metadata"].get("labels"),
        "stored": {name: part for name, part in made.items() if name not in IDENTITY},
    }
    return json.loads(YEARS.sub('"YEARS"', UID.sub("UID", json.dumps(found))))


def main() -> None:
    """Record all answers."""
    server = Server(Path(sys.argv[1]))
    server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    # Without a token controller, pods are admitted only where no token is mounted.
    account = {"metadata": {"name": "default"}, "automountServiceAccountToken": False}
    server.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
    server.ask(
        "PATCH",
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default",
        {"automountServiceAccountToken": False},
    )
    for file, record in (("refusals", refusal), ("objects", stored)):
        if not (FOLDER / f"{file}.yaml").exists():
            continue
        found = {case.title: record(server, case) for case in cases(file)}
        # One case a line: what changes is seen at a glance.
        lines = [f"{json.dumps(title)}: {json.dumps(found[title])}" for title in sorted(found)]
        (FOLDER / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

"""A test of the whole way may not write the result that a real part should produce."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import tool

status_writes = tool("status_writes")


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.py", 'api.patch(f"{CHECKS}/{name}/status", body)', 1),
        ("a.py", 'api.patch(PATH + "/status", body)', 1),
        ("a.py", 'api.patch(path, part="/status")', 1),
        ("a.py", 'kubectl("patch", "x", "--subresource=status")', 1),
        ("a.py", "custom.patch_namespaced_custom_object_status(body)", 1),
        ("a.py", 'api.patch(f"api/v1/nodes/{name}/status", body)', 0),
        ("a.py", 'api.patch("pods/p/status", body)', 0),
        ("a.py", 'agent.request("GET", "/status")', 0),
        ("a.py", 'url = f"http://{host}:8080/status"', 0),
        ("a.sh", "$ kubectl patch x --subresource=status -p '{}'\n", 1),
        ("a.sh", "$ kubectl replace --raw /apis/unbroken.dev/v1/nodechecks/a/status -f a\n", 1),
        ("a.sh", "$ kubectl get nodes -o jsonpath='{.status}'\n", 0),
    ],
)
def test_a_write_of_a_status_is_found(tmp_path: Path, name: str, text: str, count: int) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert len(list(status_writes.uses(path))) == count

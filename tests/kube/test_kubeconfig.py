"""A kubeconfig that cannot be used is one line of error, without what the file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.errors import SpecError
from unbroken.kube.client import connect

TOKEN = "very-secret"
GOOD = f"""
apiVersion: v1
kind: Config
current-context: it
contexts: [{{name: it, context: {{cluster: it, user: it}}}}]
clusters: [{{name: it, cluster: {{server: "https://127.0.0.1:9"}}}}]
users: [{{name: it, user: {{token: "{TOKEN}"}}}}]
"""
CASES = {
    "": "do not have the form of a kubeconfig",
    "[1]": "do not have the form",
    "text": "do not have the form",
    "\0": "no YAML$",
    "clusters: 3\ncontexts: []\nusers: []": "do not have the form",
    "clusters: [3]\ncontexts: [4]\nusers: [5]": "do not have the form",
    "{}": "it has no 'clusters'",
    GOOD.replace(f'"{TOKEN}"', f'"{TOKEN}'): "no YAML at line 8, column 1: found unexpected end",
    GOOD.replace(f'"{TOKEN}"', f'["{TOKEN}"]'): "Expected `str | null`, got `array`",
    GOOD.replace('"https://127.0.0.1:9"', "5"): "Expected `str`, got `int`",
    GOOD.replace("https://127.0.0.1:9", "apis.example"): "the server of its cluster is no URL",
    GOOD.replace("https:", "ftp:"): "the server of its cluster is no URL",
    GOOD.replace("current-context: it", "current-context: x"): "Context 'x' not found",
}


@pytest.mark.parametrize(("text", "reason"), CASES.items(), ids=range(len(CASES)))
async def test_the_error_of_an_unusable_kubeconfig_is_one_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    with pytest.raises(SpecError, match=reason) as raised:
        connect(file)
    said = str(raised.value)
    assert said.startswith("no usable kubeconfig: ")
    assert "\n" not in said
    assert TOKEN not in said


async def test_the_same_file_without_the_fault_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(GOOD)
    async with connect(file) as client:
        assert client.is_local

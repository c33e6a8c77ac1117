"""The page that many people share, in a real Chromium: sign in, look, sign out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.browser.conftest import Visitor
from tests.cli_calls import Cli, read_until
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
REFUSED = "Failed to load resource: the server responded with a status of 40"
"""Chromium's line about a request that is refused before the sign-in."""


@pytest.fixture
def page_server(cli: Cli) -> Iterator[str]:
    """The address of a page that the cluster's people share."""
    kubeconfig = cli.directory / "kubeconfig"
    process = cli.start("page-server", "--kubeconfig", str(kubeconfig), "--port", "0")
    try:
        (line,) = read_until(process, lambda line: "page is served" in line)
        yield line.partition("address=")[2].strip()
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert "ERROR" not in rest


def test_a_person_signs_in_with_a_token_and_out_again(
    cli: Cli, browser: Any, page_server: str
) -> None:
    token = yaml.safe_load((cli.directory / "kubeconfig").read_text())["users"][0]["user"]["token"]
    visitor = Visitor(browser, f"{page_server}nodes")
    page = visitor.page
    page.get_by_role("heading", name="Sign in to unbroken").wait_for()
    visitor.examine("signin")

    field = page.get_by_label("Token of your Kubernetes account")
    field.fill("no-token-of-anybody")
    page.get_by_label("Namespaces").fill('"><script>window.broken=1</script>')
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").get_by_text("a namespace has small letters").wait_for()
    assert page.evaluate("window.broken") is None

    page.get_by_label("Namespaces").fill("")
    field.fill("no-token-of-anybody")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("does not accept this token").wait_for()
    visitor.examine("signin-refused")

    field.fill(token)
    page.keyboard.press("Enter")
    visitor.sees("2 of 2 nodes ready")
    assert page.url == f"{page_server}nodes", "the person comes to the page that was wanted"
    assert token not in page.content()
    assert page.evaluate("document.cookie") == "", "no script can read the cookie"
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("heading", name="Jobs").wait_for()
    visitor.examine("shared-jobs")

    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in to unbroken").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Sign in to unbroken").wait_for()
    assert [one for one in visitor.errors if not one.startswith(REFUSED)] == []

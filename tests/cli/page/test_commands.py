"""Links to the page: only for a server that knows their key."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.cli.page.access import Access, write_page_file
from unbroken.cli.page.commands import link_to
from unbroken.errors import SpecError
from unbroken.local.state import Paths, State

RUNNING = State(1, 1, "https://127.0.0.1:1", "kubeconfig", 0.0, ui="http://127.0.0.1:4711/")
OLDER = State(1, 1, "https://127.0.0.1:1", "kubeconfig", 0.0)


def test_a_link_is_signed_with_the_key_of_the_server(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    server = Access(write_page_file(paths.ui, 4711).key)
    address, _, token = link_to(RUNNING, paths).partition("?link=")
    assert address == RUNNING.ui
    issued = float(token.partition(".")[0])
    assert server.use_link(token, issued, 0.0)


@pytest.mark.parametrize(
    ("running", "reason"),
    [(RUNNING, r"ui\.json is missing"), (OLDER, "earlier version"), (None, "earlier version")],
)
def test_a_cluster_that_no_link_can_open_is_to_be_restarted(
    tmp_path: Path, running: State | None, reason: str
) -> None:
    paths = Paths(tmp_path)
    with pytest.raises(SpecError, match=rf"{reason}.*restart it with: unbroken down"):
        link_to(running, paths)
    assert not paths.ui.exists()

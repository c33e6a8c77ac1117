"""A cluster, a Chromium, and a person who looks at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import cli
from tests.watching import PATIENCE_SECONDS, wait_until

__all__ = ["Visitor", "browser", "cli"]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "ui/node_modules/axe-core/axe.min.js"
SCREENSHOTS = ROOT / "build/screenshots"


@pytest.fixture
def browser() -> Iterator[Any]:
    """A Chromium of this machine."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as program:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = program.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        yield made
        made.close()


OVER = "document.documentElement.scrollWidth - innerWidth"
"""Pixels by which the page is wider than the window."""


class Visitor:
    """A person with a browser, who notes what is wrong with each page."""

    def __init__(self, browser: Any, link: str) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.origin = link.partition("?")[0].rstrip("/")
        self.errors: list[str] = []
        self.page.on(
            "console",
            lambda said: self.errors.append(said.text) if said.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(link)

    def sees(self, text: str) -> None:
        """Wait for a text on the page."""
        self.page.get_by_text(text).first.wait_for()

    def figure(self, name: str) -> str:
        """The figure of this name at the top of the page."""
        place = self.page.locator(".figure", has=self.page.get_by_text(name, exact=True))
        return str(place.locator("dd").inner_text())

    def examine(self, name: str) -> None:
        """Look at the page in both themes and at both widths."""
        for theme in ("light", "dark"):
            self.page.emulate_media(color_scheme=theme)
            for width in (1280, 400):
                self.page.set_viewport_size({"width": width, "height": 900})
                where = f"{name}-{theme}-{width}"
                # A chart takes the new width in one of the next frames.
                wait_until(lambda: self.page.evaluate(OVER) <= 0)
                self.page.evaluate(AXE.read_text())
                found = self.page.evaluate("axe.run(document)")["violations"]
                assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], where
                SCREENSHOTS.mkdir(parents=True, exist_ok=True)
                self.page.screenshot(path=SCREENSHOTS / f"{where}.png", full_page=True)
        self.page.set_viewport_size({"width": 1280, "height": 900})
        self.page.emulate_media(color_scheme="light")

"""Every `unbroken` command line of the pages has commands and options that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from unbroken.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if "reference" not in page.parts
]
UNMARKED = ("planned-moves.md",)
"""Guides that need a mark and have none yet."""
GUIDES = [
    page
    for page in (*sorted((ROOT / "docs/guide").glob("*.md")), ROOT / "docs/log-rules.md")
    if page.name not in UNMARKED
]
OURS = "unbroken|unbrokenrun|hyperpod"
OTHERS = "kubectl|helm|podman|kind|aws|curl|python|pip|make|export|sed|openssl"
PROGRAM = re.compile(rf"(?:{OURS}|{OTHERS}) ")
SHELLS = ("", "sh", "console")
ENDS = ("|", ">", ">>", "&", "&&", ";", "...")
"""Words of a shell that end a command, and what a page leaves out."""
COMMAND: Any = typer.main.get_command(app)
CONTEXT: Any = COMMAND.context_class(COMMAND)


def code(page: str) -> Iterator[str]:
    """Return the lines of a page that are indented code, or in a fence of a shell or of nothing."""
    fence = None
    for line in page.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fence = line.strip("` ") if fence is None else None
        elif fence in SHELLS or (fence is None and line.startswith("    ")):
            yield line.strip().removeprefix("$ ")


def typed(page: Path) -> Iterator[list[str]]:
    """Return the words of each command line of a page that begins with `unbroken`."""
    for line in code(page.read_text()):
        if re.match(r"unbroken [a-z-]+(?= |$)", line):
            words = shlex.split(line, comments=True)[1:]
            end = next((n for n, word in enumerate(words) if word in ENDS), len(words))
            yield words[:end]


def problem(words: list[str]) -> str:
    """Return what a command line names that does not exist; empty if it names nothing so.

    Nothing is executed: options such as `--install-completion` act while they are parsed.
    """
    command, known = COMMAND, set(CONTEXT.help_option_names) | {"-h"}
    for word in words:
        options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        if word.startswith("-") and word != "-":
            if word.partition("=")[0] not in options | known:
                return f"{command.name} has no option {word}"
        elif isinstance(command, TyperGroup):
            found = command.get_command(CONTEXT, word)
            if found is None:
                return f"{command.name} has no command {word}"
            command = found
        elif command.name == "run":  # the options after the script are the script's
            return ""
    return ""


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_whose_commands_are_not_run_says_why(page: Path) -> None:
    lines = [line for line in code(page.read_text()) if PROGRAM.match(line)]
    mark = page.read_text().splitlines()[2]
    assert mark.startswith("<!-- not run: ") == bool(lines), lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_line_of_a_page_is_one_that_is_understood(page: Path) -> None:
    wrong = {" ".join(words): problem(list(words)) for words in typed(page)}
    assert {line: why for line, why in wrong.items() if why} == {}


def test_the_pages_have_command_lines_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    assert sum(len(list(typed(page))) for page in PAGES) > 90
    (page := tmp_path / "page.md").write_text("    unbroken jobs --oops\n    unbroken nope\n")
    found = [problem(words) for words in typed(page)]
    assert found == ["jobs has no option --oops", "unbroken has no command nope"]

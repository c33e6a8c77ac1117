"""Escapes in workers' output, events and names reached the terminal of the reader.

A job could set a title, clear the screen, write the clipboard (OSC 52), overwrite a line or reverse
text. The same flaw was in kubectl (CVE-2021-25743).
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attack import terminal_programs
from unbroken.cli.terminal import coloured, visible

COLOUR = re.compile("\x1b\\[[0-9;:]*m")
CURSOR = re.compile("\x1b\\[(\\?25[lh]|[0-9]*[ABGHJK])|\x1b\\[[0-9;]*m")
"""Colours, and escapes of a live display in its own lines."""
ODD = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def on_a_terminal(*arguments: str, program: Path | None = None) -> str:
    """Run a program with a terminal as its standard output and error; return what it writes."""
    ours, theirs = pty.openpty()
    found = program or Path(terminal_programs.__file__)
    start = [sys.executable, *(["-m", "unbroken.cli.main"] if program is None else [str(found)])]
    process = subprocess.Popen(
        [*start, *arguments], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "200", "PYTHONUTF8": "1"},
    )  # fmt: skip
    os.close(theirs)
    text = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the last writer has gone
            break
        if not data:
            break
        text += data
    os.close(ours)
    process.wait()
    return text.decode().replace("\r\n", "\n")


PROGRAM = Path(terminal_programs.__file__)


@pytest.mark.slow
def test_nothing_printed_steers_the_terminal() -> None:
    text = on_a_terminal("printed", program=PROGRAM)
    assert text.count("\\x1b]0;title\\x07") >= 8
    assert "\\x0dover\\u202egnp" in text
    assert "[red]m[/red][link=http://x]n[/link]" in text
    # Our own colours are all that is left, and none of theirs.
    assert "\x1b[31m" not in text
    assert "\x1b[8m" not in text
    assert set(COLOUR.findall(text)) <= {"\x1b[32m", "\x1b[2m", "\x1b[0m"}
    assert "\x1b[32m" in text
    assert not ODD.search(COLOUR.sub("", text))


@pytest.mark.slow
def test_of_a_workers_line_only_its_colours_stay() -> None:
    text = on_a_terminal("logged", program=PROGRAM)
    assert "d\x1b[31mred\x1b[0me" in text
    assert text.rstrip().endswith("\x1b[0m"), "its colours end with it"
    assert "\\x1b]52;c;aGk=" in text
    assert not ODD.search(COLOUR.sub("", text))


@pytest.mark.slow
def test_a_live_display_is_not_steered_either() -> None:
    text = on_a_terminal("live", program=PROGRAM)
    assert "\\x1b]0;title\\x07" in text
    assert "[red]m[/red][link=http://x]" in text
    assert not ODD.search(CURSOR.sub("", text).replace("\r", ""))
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "\rover" not in text


@pytest.mark.slow
def test_a_file_gets_a_workers_line_unchanged(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        subprocess.run(
            [sys.executable, PROGRAM, "logged"], stdout=file, check=True,
            env=os.environ | {"PYTHONUTF8": "1"},
        )  # fmt: skip
    assert (tmp_path / "out").read_bytes().decode() == terminal_programs.HOSTILE + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "\x1b]0;x\x07", "--dir", "/nonexistent/\x1b[2J"),
        ("faults", "explain", "--line", "\x1b]0;x\x07 Segmentation fault"),
        ("down", "--dir", "/nonexistent/\x1b]0;x\x07"),
    ],
)
def test_the_program_itself_is_guarded(arguments: tuple[str, ...]) -> None:
    text = on_a_terminal(*arguments)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


@given(st.text(st.characters()))
def test_no_text_keeps_a_control(text: str) -> None:
    assert not ODD.search(visible(text))
    visible(text).encode()
    assert not ODD.search(COLOUR.sub("", coloured(text)))

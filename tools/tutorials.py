#!/usr/bin/env python3
"""Type the commands of a tutorial in a fresh folder, and show or write down what they print.

    tutorials.py docs/tutorials/first-job.md            # differences to the page
    tutorials.py --write docs/tutorials/first-job.md    # the page with what came

A fence with a title (```` ```python title="train.py" ````) is a file. A fence ```` ```console ````
has commands, in lines that begin with `$ `, and what they printed. A fence ```` ```sh ```` has
commands that are not run; a comment `<!-- not run: why -->` stands above it, and the page says why.

Figures and names that chance decides are not compared: see `shape`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?P<above>[^\n]*\n\n?)```(?P<kind>\w+)(?: title=\"(?P<title>[\w.-]+)\")?\n(?P<text>.*?)```",
    re.DOTALL,
)
SECONDS = 150
"""Seconds for one command, on a busy machine."""
FIELD = re.compile(r"  +(what|why|cost|also seen|boot|state|data|score|differs|others)  ")
TIMES = re.compile(r"\s+(?:timeline\s+)?\d\d:\d\d:\d\d\.\d+  ([a-z ]+?)(?:  +.*)?$")


@dataclass(frozen=True, slots=True)
class Step:
    """A file to write, or a command and what the page says it prints."""

    title: str = ""
    text: str = ""
    command: str = ""
    shown: tuple[str, ...] = ()


class UnknownFenceError(Exception):
    """A fence of a page is of none of the kinds."""


def steps(page: str) -> Iterator[Step]:
    """The files and commands of a page, in order."""
    for found in FENCE.finditer(page):
        kind, title, text = found["kind"], found["title"], found["text"]
        if title:
            yield Step(title=title, text=text)
        elif kind == "console":
            yield from commands(text)
        elif kind != "mermaid" and not found["above"].strip().startswith("<!-- not run: "):
            raise UnknownFenceError(f"```{kind} has no title and no comment `not run`: {text[:60]}")


def commands(text: str) -> Iterator[Step]:
    """The commands of a fence with what each printed."""
    command, shown = "", list[str]()
    for line in [*text.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield Step(command=command, shown=tuple(shown))
            command, shown = line[2:], []
        else:
            shown.append(line)


def shape(line: str) -> str:
    """A line without what chance decides: figures, identities, and the widths of columns."""
    line = line.rstrip()
    if field := FIELD.match(line):
        return field[1]
    if time := TIMES.match(line):
        return time[1]
    if line.startswith("goodput "):
        return "goodput"
    line = re.sub(r"-[0-9a-z]*\d[0-9a-z]{3,}\b|\b[0-9a-f]{8,}\b", "-ID", line)
    line = re.sub(r"/[\w./-]*/?(?:\.unbroken|tutorial)", "DIR", line)
    line = re.sub(r"\b\d+[smh](\d+[smh])?\b|\d[\d.,:]*", "N", line)
    return re.sub(r"\s+|-{2,}", " ", line).strip()


def typed(step: Step, folder: Path, variables: Mapping[str, str], exports: list[str]) -> str:
    """Type one command; what it printed.  `exports` is what `export` has set before."""
    if step.command.startswith("export "):
        exports.append(step.command)
        return ""
    done = subprocess.run(
        ["bash", "-c", "\n".join([*exports, step.command])],
        cwd=folder,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.stdout


def environment(home: Path) -> dict[str, str]:
    """The variables of a reader who has just installed unbroken."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "HOME": str(home), "PATH": path, "VIRTUAL_ENV": sys.prefix}


def run(
    page: str,
    home: Path,
    more: Mapping[str, str] = MappingProxyType({}),
    files: Path | None = None,
) -> Iterator[tuple[Step, str]]:
    """Type the commands of a page in a folder of `home`; each with what it printed.

    `more` are variables in addition to those of `environment`, or in their place. The folder is a
    copy of `files`; None: it is empty.
    """
    folder = home / "tutorial"
    if files is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(files, folder)
    variables, exports = {**environment(home), **more}, list[str]()
    try:
        for step in steps(page):
            if step.title:
                (folder / step.title).write_text(step.text)
            else:
                yield step, typed(step, folder, variables, exports)
    finally:
        typed(Step(command="unbroken down --purge"), folder, variables, [])


def differences(step: Step, printed: str) -> list[str]:
    """The lines that a page shows of a command and that did not come."""
    came = {shape(line) for line in printed.splitlines()}
    return [line for line in step.shown if line.strip(" .") and shape(line) not in came]


def files_of(page: Path) -> Path | None:
    """The files that the page is about: its own folder, if it is a README."""
    return page.parent if page.name == "README.md" else None


def written(page: str, home: Path, files: Path | None = None) -> str:
    """The page with what its commands printed."""
    made, end = page, 0
    for step, printed in run(page, home, files=files):
        old = "\n".join([f"$ {step.command}", *step.shown])
        text = printed.replace(str(home), "/home/you").rstrip("\n")
        new = "\n".join([f"$ {step.command}", *([text] if text else [])])
        start = made.index(old, end)  # The same command may be further up.
        made, end = made[:start] + new + made[start + len(old) :], start + len(new)
        print(new, flush=True)
    return made


def main() -> int:
    """Type pages; 1 if one of them shows what did not come."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="write down what the commands print")
    options = parser.parse_args()
    missing = 0
    for page in options.pages:
        with tempfile.TemporaryDirectory(prefix="tutorial-") as name:
            if options.write:
                page.write_text(written(page.read_text(), Path(name), files_of(page)))
                continue
            for step, printed in run(page.read_text(), Path(name), files=files_of(page)):
                for line in differences(step, printed):
                    missing += 1
                    print(f"{page}: $ {step.command}\n  did not print: {line}\n{printed}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

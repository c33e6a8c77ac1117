"""Scripts whose expectations are written by what happens: `pytest tests/core/job --rewrite`.

A line of a script is `given -> expected, expected`; after a comma at its end it goes on in the next
line. With the flag, expectations that are wrong are replaced in the file of the test. A test whose
script is made of parts (an f-string with a part in the expectation, or a script that several
parameters share with other results) is left as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 100
"""Characters of a line, as in the other files."""


def logical_lines(script: str) -> Iterator[str]:
    """Yield the lines of a script; a line that ends in a comma is joined with the next one."""
    parts: list[str] = []
    for line in filter(None, map(str.strip, script.splitlines())):
        parts.append(line)
        if not line.endswith(","):
            yield " ".join(parts)
            parts = []
    assert not parts, f"the script ends in a comma: {parts}"


Edit = tuple[int, int, list[str]]
"""The first line, the one after the last, and what replaces them."""


@dataclass(slots=True)
class Edits:
    """New lines for the files of tests."""

    is_on: bool = False
    _new: dict[Path, dict[tuple[int, int], list[str]]] = field(default_factory=dict)
    _left: set[tuple[Path, int]] = field(default_factory=set)
    """Lines that would be different for different tests."""

    def replace(self, given: str, shown: str) -> bool:
        """Have the expectation of a line replaced; False: without the flag, and for lines that are
        not found as they are in the test's file."""
        if not self.is_on:
            return False
        frame = sys._getframe(1)
        while (path := Path(frame.f_code.co_filename)).name.startswith("drive_"):
            assert frame.f_back is not None
            frame = frame.f_back
        first, last, *_ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        assert first is not None, "a call is at a line"
        edit = _find(path.read_text().splitlines()[:last], first - 1, given, shown)
        if edit is None:
            return False
        start, end, lines = edit
        if self._new.setdefault(path, {}).setdefault((start, end), lines) != lines:
            self._left.add((path, start))
        return True

    def write(self) -> Iterator[str]:
        """Change the files; yield what was done."""
        for path, start in sorted(self._left):
            yield f"{path}:{start + 1}: left, for tests that share it differ"
        for path, edits in self._new.items():
            lines, count = path.read_text().splitlines(), 0
            for (start, end), new in sorted(edits.items(), reverse=True):
                if (path, start) not in self._left:
                    lines[start:end], count = new, count + 1
            if count:
                path.write_text("\n".join(lines) + "\n")
                yield f"{path}: {count} lines written"


EDITS = Edits()


def _find(lines: list[str], first: int, given: str, shown: str) -> Edit | None:
    """Return what replaces a line of a script: a line of its own, or all of a short string."""
    for start in range(first, len(lines)):
        head, arrow, rest = lines[start].partition("->")
        before, quote, words = head.rpartition('"')
        if not arrow or not re.fullmatch(_pattern(words), given.strip()):
            continue
        end = start + 1
        while lines[end - 1].rstrip().endswith(","):
            end += 1
        after = rest[rest.index('"') :] if quote else ""
        if "{" in "".join([rest.removesuffix(after), *lines[start + 1 : end]]):
            return None
        new = _wrapped(head, shown)
        if quote and len(new) == 1 and len(new[0] + after) <= WIDTH:
            new = [new[0] + after]
        elif quote:
            indent = " " * (len(head) - len(head.lstrip()))
            inner = _wrapped(f"{indent}    {words}", shown)
            new = [f'{before}"""', *inner, f'{indent}""{after}']
        return start, end, new
    return None


def _pattern(words: str) -> str:
    """Return the pattern of what the words of a line become when their parts are filled in."""
    return ".*".join(map(re.escape, re.split(r"\{[^}]*\}", words.strip())))


def _wrapped(head: str, shown: str) -> list[str]:
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    lines = [f"{head}->"]
    for word in shown.split(", ") if shown else []:
        if len(lines[-1]) + len(word) + 2 > WIDTH:
            lines.append(f"{indent}{word},")
        else:
            lines[-1] += f" {word},"
    return [*lines[:-1], lines[-1].removesuffix(",")]

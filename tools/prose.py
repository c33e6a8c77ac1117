#!/usr/bin/env python3
"""Measure the prose of the project: pages, help texts, docstrings and comments.

    prose.py [PATH ...]              counts by class and source, and the files with the most
    prose.py --list CLASS [PATH ...] every finding of one class, with file and line
    prose.py --sample 20 --seed 3    random sentences to read

It guides and does not gate: it ends with 0 whatever it finds. `shared/LANGUAGE.md` has the rules.
A sentence of code alone is not counted, and code in a sentence counts as one word. The pages of
docs/reference are left out: they repeat texts of the source.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE = 30
"""Words in a sentence that is not counted as long."""
WIDEST = 100
"""Columns of a line of Markdown that is not counted as long."""
HEADLESS = re.compile(
    r"(Of|What|Who|Whom|Whose|Those|That|Whether|Where|When|How|So (many|much|long|often)|"
    r"The (same|other)\b(?= *[.,;:]))\b"
)
"""Openings of a docstring or help text that do not name the thing (LANGUAGE.md, rule 4)."""
WORDS = {
    r"embedded (cluster|api|kubernetes)": "local cluster",
    r"tell|tells|told|telling": "report, say, send",
    r"hear|hears|heard": "receive",
    r"doings": "activity",
    r"standing": "condition, state",
    r"doubts?": "uncertain, or name the abort",
    r"stands? back|stood back": "yield",
    r"stands? still|stood still|standstill": "is paused",
    r"goes on|go on|went on|going on|gone on": "continue, resume",
    r"anew": "again",
    r"befalls?|befell": "happens to, affects",
    r"looks? after|looked after": "manage",
    r"made good|makes? good": "repair, replace",
    r"held against": "counted for",
    r"burnt in|burns? in": "burn-in test",
    r"unasked": "without configuration",
    r"strangers?": "another program, untrusted client",
    r"mends?|mended": "fix, repair",
    r"whoever|whomever": "name the thing",
    r"of its own accord": "by itself",
    r"in earnest": "for real",
    r"hitherto|thereof|therein|hence|thus": "plain words",
    r"so far as": "as far as",
    r"beside": "with, next to, in addition to",
}
"""Patterns of words outside of the glossary, and what to write."""
JARGON = re.compile(rf"\b({'|'.join(f'(?:{word})' for word in WORDS)})\b", re.IGNORECASE)
CODE = re.compile(r"``[^`]+``|`[^`\n]+(?:\n[^`\n]+)?`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[A-Z`(\"'\[*\d])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|no|v)\.$", re.IGNORECASE)
ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+")
CLASSES = ("headless", "long sentence", "long line", "word")


@dataclass(frozen=True, slots=True)
class Text:
    """One paragraph, list item, cell or docstring."""

    source: str
    """`page`, `docstring`, `help` or `comment`."""
    path: str
    line: int
    words: str
    first: bool = True
    """False for what follows the first paragraph of a docstring."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that a reader may stumble over."""

    kind: str
    source: str
    path: str
    line: int
    shown: str


# --- Texts of a file


def markdown(path: str, lines: list[str]) -> Iterator[Text]:
    """The paragraphs, list items, headings and cells of a page, without its code."""
    found: list[str] = []
    start = 0
    fenced = comment = False
    for number, line in enumerate([*lines, ""], 1):
        fence = line.lstrip().startswith("```")
        comment = comment or line.startswith("<!--")
        indented = line.startswith("    ") and not found
        item = ITEM.match(line)
        ends = not line.strip() or fence or line.startswith(("#", "|", "<")) or item is not None
        if (ends or fenced or comment) and found:
            yield Text("page", path, start, " ".join(found))
            found = []
        if fence:
            fenced = not fenced
        elif comment:
            comment = "-->" not in line
        elif fenced or indented or not line.strip():
            continue
        elif line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield from (Text("page", path, number, cell.strip()) for cell in cells if cell.strip())
        elif line.startswith("#"):
            yield Text("page", path, number, line.strip("# \n"))
        elif not line.startswith("<"):
            start = start if found else number
            found.append(line[item.end() :].strip() if item else line.strip())


def python(path: str, source: str) -> Iterator[Text]:
    """The docstrings, help texts and comments of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                for number, part in enumerate(re.split(r"\n\s*\n", cleandoc(text))):
                    if not part.startswith("    "):  # code
                        yield Text("docstring", path, line, " ".join(part.split()), number == 0)
            case ast.keyword(arg="help", value=ast.Constant(value=str(text), lineno=line)):
                yield Text("help", path, line, " ".join(text.split()))
            case _:
                pass
    yield from _comments(path, source)


def _comments(path: str, source: str) -> Iterator[Text]:
    found: list[str] = []
    last = start = 0
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#").strip()
        if found and line != last + 1:
            yield Text("comment", path, start, " ".join(found))
            found = []
        start, last = (start if found else line), line
        if not text.startswith(("noqa", "type:", "!")):
            found.append(text)
    if found:
        yield Text("comment", path, start, " ".join(found))


# --- What is counted


def sentences(text: str) -> list[str]:
    """The sentences of a text; a full stop inside code ends none."""
    codes: list[str] = []

    def hide(found: re.Match[str]) -> str:
        codes.append(found[0])
        return f"`{len(codes) - 1}`"

    hidden = CODE.sub(hide, LINK.sub(r"\1", text))
    parts: list[str] = []
    for part in END.split(hidden):
        if parts and ABBREVIATION.search(parts[-1]):
            parts[-1] += f" {part}"
        else:
            parts.append(part)
    shown = (re.sub(r"`(\d+)`", lambda found: codes[int(found[1])], part) for part in parts)
    return [part.strip() for part in shown if part.strip()]


def length(sentence: str) -> int:
    """The words of a sentence; code counts as one."""
    return len(re.findall(r"[\w'.,/%-]*\w[\w'.,/%-]*", CODE.sub("code", sentence)))


def prose(sentence: str) -> bool:
    """Return whether a text is a sentence to read, not a name, a number or code alone."""
    return len(re.findall(r"\b[A-Za-z]{2,}\b", CODE.sub("", sentence))) >= 3


def findings(text: Text) -> Iterator[Finding]:
    """Yield all findings in one text."""
    opening = HEADLESS.match(text.words)
    if opening and text.first and text.source in ("docstring", "help"):
        yield Finding("headless", text.source, text.path, text.line, text.words[:100])
    for sentence in sentences(text.words):
        if (count := length(sentence)) > LONGEST_SENTENCE:
            shown = f"({count}) {sentence[:100]}"
            yield Finding("long sentence", text.source, text.path, text.line, shown)
        if text.source != "comment":
            for found in JARGON.finditer(CODE.sub("", sentence)):
                shown = f"{found[0].lower()}: {sentence[:90]}"
                yield Finding("word", text.source, text.path, text.line, shown)


def wide(path: str, lines: list[str]) -> Iterator[Finding]:
    """The long lines of a page; tables, code and lines without a space to break at are left out."""
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.lstrip().startswith("```")
        outside = not fenced and not line.startswith(("|", "    ", "<", "#"))
        if len(line) > WIDEST and outside and " " in line.strip()[:WIDEST]:
            yield Finding("long line", "page", path, number, line[:100])


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """The pages and modules below some paths."""
    for path in paths:
        if path.is_dir():
            yield from sorted([*path.rglob("*.md"), *path.rglob("*.py")])
        else:
            yield path


def everything() -> list[Path]:
    """The pages that a reader of the project sees, and the modules of the package."""
    pages = [*sorted(ROOT.glob("*.md")), ROOT / "docs", ROOT / "benchmarks/README.md"]
    found = files([*pages, ROOT / "src/unbroken"])
    return [path for path in found if ROOT / "docs/reference" not in path.parents]


def read(paths: Iterable[Path]) -> tuple[list[Text], list[Finding]]:
    """The texts of some files, and the findings in them."""
    texts: list[Text] = []
    found: list[Finding] = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
        source = path.read_text()
        if path.suffix == ".md":
            texts += markdown(name, source.splitlines())
            found += wide(name, source.splitlines())
        else:
            texts += python(name, source)
    found += (one for text in texts for one in findings(text))
    return texts, found


# --- What is printed


def report(texts: list[Text], found: list[Finding], limit: int = 15) -> Iterator[str]:
    """The counts, for people."""
    count = Counter(text.source for text in texts for one in sentences(text.words) if prose(one))
    sources = ("page", "help", "docstring", "comment")
    yield f"{'':16}" + "".join(f"{source:>11}" for source in sources) + f"{'all':>11}"
    rows = {kind: Counter(one.source for one in found if one.kind == kind) for kind in CLASSES}
    for name, row in {"sentences": count, **rows}.items():
        yield f"{name:16}" + "".join(f"{row[one]:11}" for one in sources) + f"{row.total():11}"
    yield ""
    for path, total in Counter(one.path for one in found).most_common(limit):
        row = Counter(one.kind for one in found if one.path == path)
        yield f"{total:5}  {path}  ({', '.join(f'{n} {kind}' for kind, n in row.most_common())})"


def sample(texts: list[Text], number: int, seed: int) -> Iterator[str]:
    """Random sentences, the same ones for the same texts and seed."""
    choices = [(one, text) for text in texts for one in sentences(text.words) if prose(one)]
    chosen = random.Random(seed).sample(choices, min(number, len(choices)))
    yield from (f"{text.path}:{text.line}: {one}" for one, text in chosen)


def main(arguments: list[str] | None = None) -> int:
    """Print the counts, the findings of a class, or random sentences."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files and folders")
    parser.add_argument("--list", choices=CLASSES, help="print every finding of one class")
    parser.add_argument("--sample", type=int, metavar="N", help="print N random sentences")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in files(options.paths)] or everything()
    texts, found = read(paths)
    if options.list:
        for one in found:
            if one.kind == options.list:
                print(f"{one.path}:{one.line}: {one.shown}")
    elif options.sample is not None:
        print("\n".join(sample(texts, options.sample, options.seed)))
    else:
        print("\n".join(report(texts, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

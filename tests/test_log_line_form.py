"""Log lines of all programs have one form, and one name for each key."""

import ast
import logging
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from unbroken.log_lines import KEYS, LONGEST, Log, line

SOURCE = Path(__file__).parents[1] / "src/unbroken"
METHODS = {"debug", "info", "warning", "error", "exception", "log"}


class Colour(Enum):
    RED = "red"


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Return every call that writes a log line, with its place."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("log"), attr=method)):
                    if method in METHODS:
                        yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def events(node: ast.expr) -> Iterator[str]:
    """Return the constant texts that an event may be."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from (*events(body), *events(other))
        case _:
            yield ""


def test_keys_are_those_of_the_table_and_all_of_them_are_used() -> None:
    used: dict[str, str] = {}
    for place, call in calls():
        used |= {key.arg: place for key in call.keywords if key.arg and key.arg != "exc_info"}
    unknown = {key: place for key, place in used.items() if key not in KEYS}
    # The values of `persist` are those of its callers.
    assert (unknown, KEYS.keys() - used.keys()) == ({}, set())


def test_events_are_constant_plain_words() -> None:
    odd = []
    for place, call in calls():
        event = call.args[1 if call.func.attr == "log" else 0]  # type: ignore[attr-defined]
        odd += [place for text in events(event) if not text or {"=", "%", "{"} & set(text)]
    assert odd == []


def test_no_module_writes_lines_of_another_form() -> None:
    writers = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "logging.getLogger(__name__)" in path.read_text()
    ]
    assert writers == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("lm/w-0", "lm/w-0"),
        (3, "3"),
        (0.123456, "0.1235"),
        (True, "yes"),
        (Colour.RED, "red"),
        (["n1", "n2"], "n1,n2"),
        (TimeoutError(), "TimeoutError"),
        (OSError("no space left"), '"no space left"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "no"', r'"say \"no\""'),
        ("x\nERROR forged job=other", r'"x\nERROR forged job=other"'),
        ("\x1b[31m\u202e", r'"\u001b[31m\u202e"'),
    ],
)
def test_values_are_words_or_quoted_and_cannot_forge_a_line(value: object, shown: str) -> None:
    assert line("it happened", {"problem": value, "node": None}) == f"it happened problem={shown}"


def test_values_are_bounded() -> None:
    assert line("", {"error": "x" * 10_000}) == f" error={'x' * (LONGEST - 3)}..."


def test_lines_come_from_the_caller_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("a.module", "it: ")
    log.debug("is not written", count=1)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed", event="100%s")
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("a.module", "it: failed event=100%s")
    assert (record.levelno, record.funcName) == (
        logging.ERROR,
        "test_lines_come_from_the_caller_with_its_traceback",
    )
    assert record.exc_info is not None

"""Reader of YAML and JSON files that users name on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from unbroken.errors import SpecError

STDIN = "-"


def read_text(path: str) -> str:
    """Read a file of a user; `-` is standard input. Raises SpecError with the file's name."""
    try:
        return sys.stdin.read() if path == STDIN else Path(path).read_text()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"cannot read {path}: byte {error.start} is not UTF-8") from error


def read_documents(path: str) -> list[Any]:
    """Read all documents of a file except empty ones; `-` is standard input.

    Raises SpecError with the file's name and the line if it cannot be read or is not YAML.
    """
    import yaml  # slow to load

    text = read_text(path)
    try:
        return [item for item in yaml.safe_load_all(text) if item is not None]
    except RecursionError as error:
        raise SpecError(f"{path} is nested too deep: simplify it") from error
    except yaml.MarkedYAMLError as error:
        mark, what = error.problem_mark, ": ".join(filter(None, (error.context, error.problem)))
        what = what.replace("'<stream end>'", "the end of the file")
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(f"{path} is not YAML: {where}{what}") from error
    except yaml.reader.ReaderError as error:
        character = f"character U+{error.character:04X} at position {error.position + 1}"
        raise SpecError(f"{path} is not YAML: {character}: {error.reason}") from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a date that does not exist, a number of thousands of digits.
        raise SpecError(f"{path} is not YAML: {error}") from error

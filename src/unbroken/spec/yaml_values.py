"""Values that users write as YAML inside of a field or an annotation.  Pure.

Aliases are refused: they let a short text stand for a huge one.
"""

from __future__ import annotations

from typing import Any

import yaml

from unbroken.errors import SpecError


class _Loader(yaml.CSafeLoader):
    """YAML with JSON's types only: a date stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def yaml_value(text: str, most: int) -> Any:
    """Return the value of a text of at most `most` characters; None: it is empty.

    Raises SpecError, whose text follows the name of the field: "is not YAML: ...".
    """
    if len(text) > most:
        raise SpecError(f"is longer than {most} characters")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
            raise SpecError("has aliases (*name): write the values out")
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f"is not YAML: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"[:200]
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__

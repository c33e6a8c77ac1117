"""Arguments and output of `unbroken nodes drain`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from unbroken.cli.nodes.commands import app
from unbroken.cli.nodes.drain import progress_line, seconds_of
from unbroken.errors import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_a_deadline_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1m", "1.5h", "10 m", "1w", "9" * 10])
def test_other_texts_are_refused_with_what_is_right(text: str) -> None:
    with pytest.raises(SpecError, match="must be a number with s, m, h or d, such as 10m"):
        seconds_of(text)


def test_progress_names_a_few_pods() -> None:
    assert progress_line("n", []) == "n: no job pod is left"
    assert progress_line("n", ["a/b"]) == "n: 1 job pod left: a/b"
    assert progress_line("n", list("abcd")) == "n: 4 job pods left: a, b, c and 1 more"


@pytest.mark.parametrize("given", [("--dir", "/tmp"), ("--context", "c"), ("-o", "json")])
def test_an_option_before_the_subcommand_is_refused_with_its_place(given: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, [*given, "drain", "node-0"], prog_name="unbroken nodes")
    assert done.exit_code == 2
    option = {"-o": "--output"}.get(given[0], given[0])
    text = " ".join(done.output.replace("│", " ").split())
    assert f"write it after the command: `unbroken nodes drain {option} ...`" in text

"""The tutorials are true: their commands are typed in a fresh folder, and print what they show."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import pytest
import yaml

from tests.tiers import FRAMEWORKS_ENV
from tests.tools import tool

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorials"
EXAMPLE = ROOT / "examples/fsdp/README.md"
tutorials = tool("tutorials")
NOT_TYPED = ("ray",)
"""Pages whose commands need a download of 1.6 GB; tests/e2e/test_ray.py does what they do."""
FRAMEWORKS = ("accelerate", "hugging-face", "lightning")
"""Pages that need the environment of `make frameworks-env`."""
IN_CI = ("first-job",)
"""The others take a minute each, or import torch."""
TYPED = [
    pytest.param(
        page,
        id=page.parent.name if page == EXAMPLE else page.stem,
        marks=[pytest.mark.slow, pytest.mark.timeout(600)]
        + ([] if page.stem in IN_CI else [pytest.mark.heavy])
        + ([pytest.mark.frameworks] if page.stem in FRAMEWORKS else []),
    )
    for page in (EXAMPLE, *sorted(PAGES.glob("*.md")))
    if page.stem not in NOT_TYPED
]
PAGE = """A page.

```python title="a.py"
print(1)
```

```console
$ cat a.py
print(1)
$ echo 12 pods, node-5ad82
12 pods, node-5ad82
...
```

<!-- not run: it needs a cluster -->
```sh
helm install x
```
"""


@pytest.mark.parametrize("page", TYPED)
def test_a_tutorial_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    if page.stem == "fast-recovery" or page == EXAMPLE:
        pytest.importorskip("torch")
    if page.stem == "kubernetes" and shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian's package kubernetes-client)")
    active = {"VIRTUAL_ENV": str(FRAMEWORKS_ENV), "PYTHONPATH": str(ROOT / "src")}
    variables = active if page.stem in FRAMEWORKS else {}
    for step, printed in tutorials.run(
        page.read_text(), tmp_path, variables, tutorials.files_of(page)
    ):
        assert tutorials.differences(step, printed) == [], f"$ {step.command}\n{printed}"


def test_every_tutorial_has_commands_and_every_fence_is_run_or_says_why_not() -> None:
    pages = sorted(PAGES.glob("*.md"))
    assert len(pages) == 9
    for page in pages:
        found = list(tutorials.steps(page.read_text()))
        assert (page.stem in NOT_TYPED) == (sum(bool(step.command) for step in found) < 6)
        for step in found:
            if step.title.endswith(".py"):
                compile(step.text, step.title, "exec")
            elif step.title.endswith(".yaml"):
                assert yaml.safe_load(step.text)["kind"]


def test_the_pages_with_the_same_script_show_the_same_script() -> None:
    scripts = {
        next(
            step.text for step in tutorials.steps((PAGES / f"{name}.md").read_text()) if step.title
        )
        for name in ("first-job", "survive-a-node")
    }
    assert len(scripts) == 1


def test_the_lines_with_which_no_step_is_lost_are_as_many_as_the_pages_say() -> None:
    page = (PAGES / "fast-recovery.md").read_text()
    before, after = (step.text.splitlines() for step in tutorials.steps(page) if step.title)
    assert len([line for line in difflib.ndiff(before, after) if line.startswith("+ ")]) == 5
    names = ("explanation/promises", "faq", "guide/state")
    pages = [" ".join((ROOT / f"docs/{name}.md").read_text().lower().split()) for name in names]
    assert all("[five lines](" in text for text in pages)


def test_a_page_is_read_as_files_and_commands() -> None:
    file, cat, echo = tutorials.steps(PAGE)
    assert (file.title, file.text) == ("a.py", "print(1)\n")
    assert (cat.command, cat.shown) == ("cat a.py", ("print(1)",))
    assert echo.shown == ("12 pods, node-5ad82", "...")


def test_a_fence_that_is_neither_run_nor_explained_is_an_error() -> None:
    with pytest.raises(tutorials.UnknownFenceError, match="helm"):
        list(tutorials.steps(PAGE.replace("<!-- not run: it needs a cluster -->", "Install it:")))


def test_figures_may_differ_and_words_may_not(tmp_path: Path) -> None:
    changed = PAGE.replace("12 pods, node-5ad82\n...", "13 pods, node-71b3f\n...\n14 machines")
    changed = changed.replace("$ echo 12", "$ unbroken=1; echo 12")
    steps = list(tutorials.steps(changed))
    printed = "12 pods, node-5ad82\n"
    assert tutorials.differences(steps[2], printed) == ["14 machines"]


@pytest.mark.slow
def test_each_command_that_a_page_repeats_gets_its_own_output(tmp_path: Path) -> None:
    page = PAGE.replace("...\n```", "...\n$ ls\na.py\n$ touch b.py\n$ ls\n```")
    made = tutorials.written(page, tmp_path)
    assert "$ ls\na.py\n$ touch b.py\n$ ls\na.py\nb.py\n```" in made


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("  timeline   12:03:13.106  last progress  -0.336 s (step 98)", "last progress"),
        ("             12:03:13.106  last progress  -0.336 s (step 98)", "last progress"),
        ("  timeline   12:03:13.106  detected", "detected"),
        ("             12:03:13.567  stopped        +0.125 s (train-pods-0 last)", "stopped"),
        ("  remedy     process: restart the processes", "remedy process: restart the processes"),
        ("goodput   75.1% of 55.4 s; start-up 10.4 s", "goodput"),
    ],
)
def test_a_report_is_compared_by_its_fields(line: str, shape: str) -> None:
    assert tutorials.shape(line) == shape

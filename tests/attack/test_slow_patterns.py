"""Patterns that take a backtracking engine for ever, or RE2 long to compile.

The first attack: a job with one log rule `(?:|){64}(?!)`.  RE2 refuses it, so it ran on Python's
`re` in the operator's event loop, where it has 2^64 ways to fail on the empty line: every operator
froze.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS
from tests.job_samples import rule as job_with_rule
from tests.operator.conftest import conditions, job
from tests.operator.conftest import place as place
from tests.tools import tool
from unbroken.cluster_api.shapes import schema, violations
from unbroken.core.logs.patterns import PatternSet
from unbroken.core.logs.rule_config import rule_warnings
from unbroken.local.admissions import admit_job
from unbroken.local.apiserver.schema.constraints import string_checks
from unbroken.local.apiserver.schema.structural import QUANTITY_OUTLINE
from unbroken.operator.webhook.review import answered, asked, judged
from unbroken.spec import patterns
from unbroken.spec.job.parse import parse_job
from unbroken.spec.log_monitoring import read_log_monitoring
from unbroken.spec.patterns import Pattern, pattern_facts

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
HOSTILE = {
    "the audit's": "(?:|){64}(?!)",
    "nested repetition": r"(?=(a+)+$)(?!)",
    "a back-reference": r"(.*)*\1\1\1(?!)",
    "a conditional": "(a)?(?(1)(?:|){64}(?!)|b)",
    "possessive": "(?:(?:|){64}(?!))++",
    "look-behind": "(?:|){64}(?<=b)(?!)",
    "in a class at first": "[(?!](?:|){64}(?!)",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("key", ["logPattern", "stopPattern"])
def test_every_admission_refuses_at_once_with_place_and_remedy(source: str, key: str) -> None:
    manifest = job_with_rule(**{key: source})
    review = asked(
        json.dumps({"request": {"uid": "1", "namespace": "a", "object": manifest}}).encode()
    )
    verdict, _ = judged(review)
    path = f"spec.runPolicy.logMonitoringConfiguration[0].{key}"
    (problem,) = verdict.problems
    assert problem.path == path
    assert "RE2 does not know" in problem.message
    assert " at character " in problem.message
    assert answered(review, verdict)["response"]["allowed"] is False
    assert [one.path for one in admit_job(manifest).problems] == [path]


@pytest.mark.slow
async def test_an_operator_without_webhook_fails_the_job_and_serves_the_next(place: Any) -> None:
    async with place() as at:
        async with at.operator():
            pass  # it installs the definitions
        hostile = job("hostile")
        rule = {"name": "r", "logPattern": HOSTILE["the audit's"], "faultOnMatch": True}
        hostile["spec"]["runPolicy"] = {"logMonitoringConfiguration": [rule]}
        await at.post("hyperpodpytorchjobs", hostile)
        async with at.operator():
            await at.post("hyperpodpytorchjobs", job("honest"))
            await at.until("pods", lambda listed: len(listed["items"]) == 2)
            found = await at.until("hyperpodpytorchjobs/hostile", conditions)
    failed = conditions(found)["Failed"]
    assert "logPattern" in failed["message"]
    assert "(?! at character 10: RE2 does not know negative look-ahead" in failed["message"]


LIST = "spec.runPolicy.logMonitoringConfiguration"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNBOUNDED = {
    "Unicode classes": lambda n: f"{n}" + r"\pL" * 20,
    "negated and folded": lambda n: f"(?i){n}" + r"\PL" * 20,
    "counted repetitions": lambda n: f"{n}" + "x{0,1000}" * 8,
    "characters": lambda n: f"{n}" + "a?" * 100,
}


def job_with_patterns(*sources: str) -> Object:
    """A job with a rule, named r0, r1, ..., for each of the patterns."""
    manifest = job_with_rule()
    rules = [
        {"name": f"r{n}", "logPattern": source, "faultOnMatch": True}
        for n, source in enumerate(sources)
    ]
    manifest["spec"]["runPolicy"] = {"logMonitoringConfiguration": rules}
    return manifest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The patterns that RE2 was given since the test began, and its memory for each."""
    given = list[tuple[str, int]]()
    compile_real = patterns.re2.compile

    def counted(source: str, options: Any) -> Any:
        given.append((source, options.max_mem))
        return compile_real(source, options)

    monkeypatch.setattr(patterns.re2, "compile", counted)
    pattern_facts.cache_clear()
    yield given
    pattern_facts.cache_clear()


@pytest.mark.parametrize("of", UNBOUNDED.values(), ids=UNBOUNDED)
def test_no_pattern_of_a_job_beyond_the_bounds_is_compiled(
    of: Callable[[int], str], compiled: list[tuple[str, int]]
) -> None:
    parsed = parse_job(job_with_patterns(*map(of, range(60))))
    assert [one.path for one in parsed.problems] == [LIST]
    assert rule_warnings(parsed.spec) == []
    assert compiled == []


def test_short_patterns_with_large_programs_are_refused_by_their_rules_names(
    compiled: list[tuple[str, int]],
) -> None:
    """The attack: 64 rules of `\\pL{400}` in 7.6 KB froze the operator for 24 s."""
    sources = [rf"\pL{{400}}x{LETTERS[n % 26]}{LETTERS[n // 26]}" for n in range(64)]
    parsed = parse_job(job_with_patterns(*sources))
    assert [one.path for one in parsed.problems] == [f"{LIST}[{n}].logPattern" for n in range(3)]
    assert "more than 16384 instructions" in parsed.problems[0].message
    assert 'with the patterns of rule "r2"' in parsed.problems[2].message
    assert rule_warnings(parsed.spec) == []
    assert compiled == [(source, 1 << 20) for source in sources[:3]]


def test_programs_that_are_too_large_only_together_are_refused(
    compiled: list[tuple[str, int]],
) -> None:
    sources = [rf"\pL{{9}}x{letter}" for letter in LETTERS]
    fitting = 32_768 // pattern_facts(sources[0]).size
    parsed = parse_job(job_with_patterns(*sources))
    assert [one.path for one in parsed.problems] == [f"{LIST}[{fitting}].logPattern"]
    assert f'with the patterns of rule "r{fitting}"' in parsed.problems[0].message
    assert len(compiled) == fitting + 1
    assert not parse_job(job_with_patterns(*sources[:fitting])).problems


def test_patterns_of_an_annotation_have_smaller_programs_as_the_operator_runs_them() -> None:
    """Four rules of `.*[ab].{900}x` took 4 s of the operator's loop for 64 KiB of a log."""
    pattern = ".*[ab].{400}x"
    assert not parse_job(job_with_patterns(pattern, pattern)).problems
    text = json.dumps([{"name": f"r{n}", "logPattern": pattern} for n in range(2)])
    (problem,) = read_log_monitoring(text).problems
    assert "more than 4096 instructions" in problem.message
    assert 'with the patterns of rule "r1"' in problem.message


@pytest.mark.parametrize("memory", [1, 4096, 64 * 1024, 1 << 20])
def test_a_set_of_patterns_without_memory_still_finds_all_matches(memory: int) -> None:
    found = [Pattern(one) for one in (".*b.{40}", ".*a.{60}c", "x", ".*")]
    lines = [b"", b"x", b"ab" * 40 + b"c", b"xb" + b"y" * 40]
    expected = [[i for i, one in enumerate(found) if one.is_match(line)] for line in lines]
    patterns_at_once = PatternSet(found, memory)
    assert [patterns_at_once.match(line) for line in lines] == expected


def test_every_documented_log_rule_is_re2() -> None:
    sources = [
        source
        for path in MANIFESTS.glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        for source in _patterns(document)
    ]
    assert len(sources) > 5
    assert [source for source in sources if pattern_facts(source).problem] == []


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value[key] for key in ("logPattern", "stopPattern") if key in value)
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for one in inside:
            yield from _patterns(one)


def test_a_definition_cannot_stall_the_embedded_api_server() -> None:
    causes = list[Any]()
    for check in string_checks({"pattern": "^(a|a|a)*$"}):
        check("a" * 50_000 + "!", "spec.name", causes)
    assert len(causes) == 1


def test_a_quantity_of_many_digits_is_judged_at_once() -> None:
    assert QUANTITY_OUTLINE.fullmatch("1" * 500_000 + "?") is None


def test_every_pattern_of_the_cluster_api_runs_on_re2() -> None:
    model = schema()
    patterned = [name for name, shape in model.shapes.items() if shape.pattern]
    assert len(patterned) > 20
    for name in patterned:
        assert list(violations(model, name, "a." * 40_000 + "\n"))
    assert not list(violations(model, "ClusterAccountingDatabaseEndpoint", "db.example.com"))
    assert list(violations(model, "ClusterAccountingDatabaseEndpoint", "db..example.com"))
    assert not list(violations(model, "AlarmName", " x "))
    assert list(violations(model, "AlarmName", "  "))


EVASIONS = {
    "a variable": "import re\ndef f(p): return re.compile(p)",
    "a format": "import re\ndef f(p): return re.match(f'{p}', '')",
    "a keyword": "import re\ndef f(p): return re.search(pattern=p, string='')",
    "an alias": "import re as r\ndef f(p): return r.compile(p)",
    "a name": "from re import compile as c\ndef f(p): return c(p)",
    "handed on": "import re\ndef f(p): return getattr(re, 'compile')(p)",
    "kept": "import re\nr = re\ndef f(p): return r.compile(p)",
    "the function kept": "import re\nc = re.compile\ndef f(p): return c(p)",
    "a map": "import re\ndef f(ps): return [*map(re.compile, ps)]",
    "by text": "import importlib\ndef f(p): return importlib.import_module('re').compile(p)",
    "the table of modules": "import sys\ndef f(p): return sys.modules['re'].compile(p)",
    "another module's": "import json.decoder as d\ndef f(p): return d.re.compile(p)",
    "the machinery": "from re import _compiler\ndef f(p): return _compiler.compile(p)",
    "another engine": "import regex\ndef f(p): return regex.compile(p)",
    "a shell's pattern": "import fnmatch\ndef f(p): return fnmatch.fnmatch('', p)",
    "RE2 without its bounds": "import re2\ndef f(p): return re2.compile(p)",
    "in a lambda": "import re\nf = lambda p: re.compile(p)",
}


def refused(root: Path) -> Iterator[str]:
    """Findings of tools/check_patterns.py."""
    found: Iterator[str] = tool("check_patterns").refused(root)
    return found


@pytest.mark.parametrize("text", EVASIONS.values(), ids=EVASIONS)
def test_the_check_finds_a_pattern_that_is_no_literal(text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert list(refused(tmp_path))


def test_the_check_finds_nothing_in_the_product(tmp_path: Path) -> None:
    assert list(refused(ROOT / "src/unbroken")) == []
    fine = "import re\nX = re.compile('a' + 'b')\ndef f(t): return re.match(r'\\d', t), X.match(t)"
    (tmp_path / "module.py").write_text(fine)
    assert list(refused(tmp_path)) == []


def test_a_linear_pattern_of_a_user_still_works() -> None:
    assert Pattern(r".*loss=(\S+)").first_group(b"step 1 loss=0.5") == "0.5"

"""Numbers in text from outside that Python's own readers refuse late, or read too well.

The attack: `kubectl logs --tail` with 4,500 digits, or a resourceVersion above 64 bits, was
answered with status 500 and a traceback. A label or annotation with such a number raised ValueError
in the program that read the object.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightkube.models.core_v1 import PodStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from tests.operator.conftest import job
from tests.tools import tool
from unbroken.agent.options import parse
from unbroken.agent_http.peer import AnswerHead
from unbroken.core.job.life import as_port
from unbroken.core.logs.pattern_trees import Unreadable, read_pattern
from unbroken.core.logs.rule_sets import rule_sets
from unbroken.core.nodes.health_object import Memory, read_memory
from unbroken.core.ray_resume import RayState
from unbroken.errors import PeerError, SpecError
from unbroken.foreign_numbers import INT64_MAX, finite_number, no_number, whole_number
from unbroken.local.apiserver.http.requests import Query, list_options
from unbroken.local.apiserver.http.status import ApiError
from unbroken.local.kubeflow.controller import job_picture
from unbroken.local.node.logs import log_options
from unbroken.local.node.processes.cri_log import stamp
from unbroken.local.ray.admission import admit_raycluster
from unbroken.operator.election import is_dead
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.kueue.objects import Priority, workload_body
from unbroken.operator.resume.ray_views import dashboard_url, read_state
from unbroken.operator.resume.record import read_record
from unbroken.spec import keys
from unbroken.spec.job.parse import parse_job

NO_NUMBERS = {
    "long": "9" * 4_500,
    "above 64 bits": str(INT64_MAX + 1),
    "zeros": "0" * 5_000 + "1",
    "superscript": "²",
    "arabic": "\u0661\u0662",
    "full width": "\uff11",
    "underscore": "1_0",
    "space": " 1",
    "newline": "1\n",
    "sign": "+1",
    "hexadecimal": "0x1",
    "empty": "",
}
texts = pytest.mark.parametrize("text", NO_NUMBERS.values(), ids=NO_NUMBERS)


@texts
def test_only_ascii_digits_of_64_bits_are_a_whole_number(text: str) -> None:
    assert whole_number(text) is None


def test_a_whole_number_is_within_its_range() -> None:
    assert [whole_number(text, 1, 10) for text in ("0", "1", "10", "11")] == [None, 1, 10, None]
    assert whole_number(str(INT64_MAX)) == INT64_MAX


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e999", "9" * 500, "1_0.0", "\u0660.\u0665", "5.0\n", ""]
)
def test_a_text_without_a_finite_number_is_refused(text: str) -> None:
    assert finite_number(text, -1e300, 1e300) is None


def test_a_finite_number_is_within_its_range() -> None:
    read = [finite_number(text, 0.0, 10.0) for text in ("-0.1", "0.5", "1E1", "10.1", "+1.")]
    assert read == [None, 0.5, 10.0, None, 1.0]


def test_an_error_repeats_a_part_of_the_text() -> None:
    assert no_number("tailLines", "x", 0, 9) == "tailLines: 'x' is not a number from 0 to 9"
    assert len(no_number("tailLines", "9" * 4_500, 0, INT64_MAX)) < 150


@texts
@pytest.mark.parametrize("name", ["tailLines", "limitBytes", "sinceSeconds"])
def test_a_log_query_with_such_a_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(SpecError, match=name):
        log_options({name: text}, 1e9)


@pytest.mark.parametrize(
    "text", ["9999-12-31T23:59:59-23:00", "99999-01-01T00:00:00Z", "9" * 4_500]
)
def test_a_log_query_with_a_time_beyond_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="sinceTime"):
        log_options({"sinceTime": text}, 1e9)


def test_a_log_query_since_the_distant_past_is_a_query_of_all() -> None:
    for query in ({"sinceSeconds": str(INT64_MAX)}, {"sinceTime": "0001-01-01T00:00:00+23:00"}):
        assert log_options(query, 1e9).since == stamp(0)


@texts
@pytest.mark.parametrize("name", ["resourceVersion", "limit", "timeoutSeconds"])
def test_a_list_with_such_a_number_is_refused(name: str, text: str) -> None:
    if text:  # Empty is absent.
        with pytest.raises(ApiError) as caught:
            list_options(Query({name: text}), is_watch=False)
        assert caught.value.code == 400


@texts
def test_an_object_with_such_a_number_is_read_without_it(text: str) -> None:
    made = copy.deepcopy(job())
    slices = f"{keys.KUEUE_PREFIX}podset-slice-size"
    made["metadata"] |= {"labels": {keys.TIME_LIMIT: text}, "annotations": {slices: text}}
    body = workload_body(
        made, JobIdentity("ns", "lm", "uid"), parse_job(made).spec, "v1beta2", Priority()
    )["spec"]
    assert "maximumExecutionTimeSeconds" not in body
    assert all("topologyRequest" not in one for one in body["podSets"])
    assert read_record({keys.RESUME_COUNT: text}).count == 0
    policy = {"logMonitoringConfiguration": [{"name": "r", "logPattern": "x"}]}
    document = {"spec": {"nprocPerNode": text, "runPolicy": policy}}
    assert [one.nproc for one in rule_sets([document])] == [None]
    annotated = job()
    annotated["metadata"] |= {"namespace": "ns", "uid": "u"}
    annotated["metadata"]["annotations"] = {keys.REPLACED_PODS: f"{text} a"}
    if text == text.strip():  # The value is split at spaces.
        assert job_picture(annotated, (), ()).replaced.count == 0


@texts
def test_a_port_a_rate_and_a_version_of_such_a_text_are_none(text: str) -> None:
    assert as_port(text) == 0
    cluster = {"spec": {"headGroupSpec": {"rayStartParams": {"dashboard-port": text}}}}
    pod = Pod(metadata=ObjectMeta(), status=PodStatus(podIP="10.0.0.1"))
    assert dashboard_url(cluster, pod) == "http://10.0.0.1:8265"
    with pytest.raises(PeerError):
        _ = AnswerHead(200, {"content-length": text}).length
    assert not is_dead(f"host/boot/{text}/1")


@texts
def test_a_port_of_a_ray_head_in_such_a_text_is_refused(text: str) -> None:
    head: dict[str, object] = {"template": {"spec": {"containers": [{"name": "h", "image": "i"}]}}}
    cluster = {"metadata": {"name": "rc"}, "spec": {"headGroupSpec": head}}
    assert not admit_raycluster(cluster).problems
    head["rayStartParams"] = {"dashboard-port": text}
    (problem,) = admit_raycluster(cluster).problems
    assert problem.path == "spec.headGroupSpec.rayStartParams.dashboard-port"


@texts
@pytest.mark.parametrize("name", ["nproc-per-node", "nnodes", "server-port", "local-ranks-filter"])
def test_an_option_of_the_agent_with_such_a_number_is_refused(name: str, text: str) -> None:
    if text:  # Empty is absent.
        with pytest.raises(SpecError, match=name):
            parse([f"--{name}={text}", "train.py"], {})


@pytest.mark.parametrize("digits", [10, 20, 400, 4_300, 5_000])
def test_a_state_with_such_a_number_counts_as_missing(digits: int) -> None:
    for text in ('{"cluster":"a","attempt":%s}', '{"head":{"name":"h","restarts":%s}}'):
        assert read_state({keys.RESUME_RAY: text % ("9" * digits)}) == RayState()
    assert read_state({keys.RESUME_RAY: '{"attempt":7}'}).attempt == 7


def test_a_sign_is_read_where_numbers_below_0_are_allowed() -> None:
    read = [whole_number(text, -5, 5) for text in ("-5", "+5", "-6", "--1", "-", "5")]
    assert read == [-5, 5, None, None, None, 5]


@pytest.mark.parametrize("number", ["Infinity", "1" + "0" * 400, "9" * 5_000, "NaN"])
def test_what_a_daemon_remembers_survives_any_number(number: str) -> None:
    text = '{"boot":"a","verified":"","cursor":"","conditions":[],"faults":[],"past":{"f":'
    assert read_memory(f'{text}{number}}},"xids":[["p",{number},1]]}}') == Memory()


@pytest.mark.parametrize(
    "pattern", ["a{" + "9" * 5_000 + "}", r"\x{110000}", r"\x{" + "f" * 5_000 + "}"]
)
def test_a_count_or_a_character_beyond_all_makes_a_pattern_unreadable(pattern: str) -> None:
    with pytest.raises(Unreadable):
        read_pattern(pattern)


@cache
def checker() -> Any:
    """tools/check_numbers.py."""
    return tool("check_numbers")


EVASIONS = {
    "name": "int(text)",
    "float": "float(text)",
    "attribute": "int(node.version)",
    "item": "int(match[1])",
    "call": "int(text.strip())",
    "joined texts": "int(a + b)",
    "base": "int(text, 16)",
    "map": "list(map(int, text.split()))",
    "key": "sorted(names, key=int)",
    "parameter of text": "def f(text: str): return int(text)",
    "parameter of either": "def f(text: str | float): return int(text)",
    "hidden parameter": "def f(x: float):\n    def g(x): return int(x)",
}
NUMBERS = (
    "int(1e9)",
    "float('inf')",
    "int(a * 2)",
    "int(a + 1)",
    "int(a > b)",
    "int(len(a))",
    "def f(x: float | None): return int(x)",
    "def f(x: int): return float(x)",
)


def refused(root: Path) -> list[str]:
    """Findings of tools/check_numbers.py."""
    return [found for found in checker().refused(root) if not found.startswith("REASONS")]


@pytest.mark.parametrize("source", EVASIONS.values(), ids=EVASIONS)
def test_the_check_finds_a_number_that_is_read_from_text(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert refused(tmp_path)


@pytest.mark.parametrize("source", NUMBERS)
def test_the_check_allows_what_is_evidently_a_number(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert refused(tmp_path) == []


def test_the_check_asks_for_no_reason_that_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire/codec.py").write_text("float(value)")
    found = list(checker().refused(tmp_path))
    assert "REASONS: wire/worker.py is not needed" in found
    assert not [one for one in found if "codec" in one]

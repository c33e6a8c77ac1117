"""Numbers in text from outside that Python's own readers refuse late, or read too well.

The attack: `kubectl logs --tail` with 4,500 digits, or a resourceVersion above 64 bits, was
answered with status 500 and a traceback. A label or annotation with such a number raised ValueError
in the program that read the object.
"""

from __future__ import annotations

import copy

import pytest

from tests.operator.conftest import job
from unbroken.core.logs.rule_sets import rule_sets
from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT64_MAX, finite_number, no_number, whole_number
from unbroken.local.apiserver.http.requests import Query, list_options
from unbroken.local.apiserver.http.status import ApiError
from unbroken.local.kubeflow.views import job_picture
from unbroken.local.node.logs import log_options
from unbroken.local.node.processes.cri_log import stamp
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.kueue.objects import Priority, workload_body
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

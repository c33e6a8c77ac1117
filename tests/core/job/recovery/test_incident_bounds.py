"""Incidents as written: small, and with the culprit's last words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.job.recovery import symptoms as symptoms_of
from unbroken.core.job.recovery.incidents import OBJECT_BYTES, TEXT_BYTES, bounded, cut, writable
from unbroken.spec.job.codec import incident_to
from unbroken.spec.job.incident import Incident, Remedy, Restored, StackGroup, Symptom

JOB = {"name": "j", "namespace": "default", "uid": "u"}
texts = st.sampled_from(
    [letter * length for letter in ("a", "\0", "é", "\U0001f600") for length in (0, 1, 300, 3000)]
)
lines = st.builds(lambda text, count: (text,) * count, texts, st.integers(0, 30))
symptoms = st.builds(
    Symptom, st.just(1.0), texts, texts, texts, texts, st.none() | st.integers(0, 10**6), lines,
    st.none(), texts, st.none() | st.integers(0, 2**53),
)  # fmt: skip
groups = st.builds(StackGroup, texts, st.integers(0, 10**6), texts, lines)


@settings(max_examples=30)
@given(
    symptoms,
    st.lists(symptoms, max_size=4),
    st.integers(1, 30),
    st.lists(groups, max_size=20),
    texts,
)
def test_it_is_small_whatever_is_told(
    culprit: Symptom, some: list[Symptom], times: int, those: list[StackGroup], text: str
) -> None:
    incident = Incident(
        1, 0, culprit, (culprit, *some * times), Remedy.PROCESS, text, 1.0, outcome=text,
        blame=text, groups=tuple(those), resumed=text,
        restored=(Restored(text, 1, 2, text, 3.0, 4, text, text, 5),) * times * 2,
    )  # fmt: skip
    assert len(json.dumps(incident_to(bounded(incident), JOB))) < OBJECT_BYTES


def test_what_is_usual_is_kept_as_it_is() -> None:
    said = tuple(f"line {number}: " + "x" * 300 for number in range(24))
    culprit = Symptom(1.0, "PythonException", "ValueError: x" * 20, "p", "n", 3, said)
    group = StackGroup("0-2", 3, "waits in all_reduce", ("all_reduce (d.py:1)",) * 16)
    incident = Incident(1, 0, culprit, (culprit,), Remedy.POD, "why", 1.0, groups=(group,) * 8)
    assert bounded(incident) == incident


@pytest.mark.parametrize(
    ("culprit", "fault"),
    [
        (Symptom(1.0, "LogRule", "silent: 5 s", rule="los s:1", violation="Hang"), "LogHang_loss1"),
        (Symptom(1.0, "Signal", "killed by SIGKILL", rank=0, exit_code=137), "SIGKILL"),
        (Symptom(1.0, "NodeLost", "node n has gone", "p", "n"), "NodeLost"),
    ],
)
def test_a_written_incident_names_the_fault_as_the_condition_does(
    culprit: Symptom, fault: str
) -> None:
    incident = Incident(1, 0, culprit, (culprit,), Remedy.POD, "why", 1.0)
    assert writable(incident).fault == symptoms_of.reason_of(culprit) == fault
    assert incident_to(writable(incident), JOB)["spec"]["fault"] == fault


def test_the_last_lines_of_a_culprit_are_kept() -> None:
    said = (*["\0" * 500] * 30, "ValueError: no such column")
    culprit = Symptom(1.0, "PythonException", "x", evidence=said)
    kept = bounded(Incident(1, 0, culprit, (culprit,), Remedy.POD, "why", 1.0)).culprit.evidence
    assert kept[-1] == "ValueError: no such column"
    assert 1 < len(kept) < len(said)


@given(st.text(max_size=3000))
def test_cut_keeps_the_beginning(text: str) -> None:
    found = cut(text, TEXT_BYTES)
    assert text.startswith(found)
    assert len(json.dumps(found)) <= TEXT_BYTES
    assert found == text or len(found) > TEXT_BYTES // 24

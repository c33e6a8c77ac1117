"""The table of faults as text: what is read, what is refused, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unbroken.nodes
from unbroken.spec.keys import GPU_UNHEALTHY, HARDWARE_UNHEALTHY
from unbroken.spec.nodes.fault_table import FaultTable, GpuSign, load_fault_table, symptom_text
from unbroken.spec.nodes.values import Action
from unbroken.spec.problems import ManifestError

SHIPPED = (Path(unbroken.nodes.__file__).parent / "data/faults.toml").read_text()
FAULT = 'title = "t", class = "gpu", action = "reboot", source = "s"'


def load(text: str) -> FaultTable:
    return load_fault_table([("shipped", SHIPPED), ("mine", f"version = 1\n{text}")])


def problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as refused:
        load(text)
    return [str(problem) for problem in refused.value.problems]


# Reference cluster-nodes-and-ray.md section 3, with reliability.md section 5a where it is finer.
ACTIONS = {
    Action.RESTART_JOB: (8, 13, 25, 31, 32, 43, 45, 60, 68, 77, 80, 86, 94, 105, 130, 139),
    Action.RESET_GPU: (46, 48, 62, 109, 110, 119, 120, 143, 144, 150, 155, 156, 158),
    Action.REBOOT: (73, 151),
    Action.REPLACE: (54, 64, 74, 79, 95, 136, 140, 142),
    Action.NONE: (37, 38, 44, 63, 66, 78, 92, 93, 106, 121, 137, 141, 159, 161, 167, 172),
}


@pytest.mark.parametrize(
    ("xid", "action"), [(xid, action) for action, xids in ACTIONS.items() for xid in xids]
)
def test_shipped_xids_have_the_actions_of_the_reference(xid: int, action: Action) -> None:
    assert load("").entries[f"Xid{xid}"].action is action


def test_every_shipped_entry_names_its_source_and_says_its_symptom() -> None:
    for name, entry in load("").entries.items():
        assert entry.source, name
        assert symptom_text(entry), name


def test_every_xid_of_the_catalogue_is_there() -> None:
    known = {number for entry in load("").entries.values() for number in entry.xid}
    listed = {8, 11, 13, 25, 31, 32, *range(37, 42), *range(43, 47), 48, 54, 60, 62, 63, 64}
    listed |= {*range(66, 81), *range(82, 87), 88, 89, *range(92, 108), 109, 110, 119, 120, 121}
    listed |= {*range(126, 138), *range(139, 166), 167, 168, 171, 172}
    assert sorted(listed - known) == []


def test_conditions_follow_the_class() -> None:
    entries = load("").entries
    assert entries["Xid79"].condition_type() == GPU_UNHEALTHY
    assert entries["GpuRemapFailed"].condition_type() == GPU_UNHEALTHY
    assert entries["ReadOnlyRemount"].condition_type() == HARDWARE_UNHEALTHY


def test_a_users_file_changes_one_field_and_leaves_the_others() -> None:
    table = load('[fault.Xid79]\naction = "reboot"')
    assert table.entries["Xid79"].action is Action.REBOOT
    assert table.entries["Xid79"].title == "GPU has fallen off the bus"
    assert (table.origins["Xid79"], table.origins["Xid74"]) == ("mine", "shipped")


def test_a_users_file_turns_off_and_adds() -> None:
    text = f"[fault]\nGpuLost = {{ disabled = true }}\nMine = {{ nvml = 'lost', {FAULT} }}"
    entries = load(text).entries
    assert "GpuLost" not in entries
    assert entries["Mine"].nvml is GpuSign.LOST


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[fault.A", "is not TOML"),
        ("[faults.A]", "faults: Forbidden: unknown field; did you mean fault?"),
        (f"[fault]\nA = {{ xid = [0], {FAULT} }}", "fault.A.xid[0]: Invalid value: 0"),
        (f"[fault]\nA = {{ {FAULT} }}", "fault.A: Required value: a symptom is needed"),
        (f"[fault]\nA = {{ xid = [900], host = 'disk-space', {FAULT} }}", "fault.A.host: Forbid"),
        (f"[fault]\nA = {{ xid = [79], {FAULT} }}", "fault.A.xid: Invalid value: 79: Xid79 has"),
        (f"[fault]\n'a b' = {{ xid = [900], {FAULT} }}", 'fault.a b: Invalid value: "a b"'),
        (f"[fault]\nA = {{ xid = [900], recovery = [1], {FAULT} }}", "fault.A.recovery: Forbid"),
        (f"[fault]\nA = {{ kernel = ['x'], beside = [{{ action = 'none' }}], {FAULT} }}", "beside"),
        ("[fault]\nXid79 = 1", "fault.Xid79: Invalid value: 1: must be a table"),
        ("[fault.DiskSpace]\nlimit = 2", "fault.DiskSpace.limit: Invalid value: 2"),
        ("[fault.Xid48]\nrepeats = { times = 1 }", "fault.Xid48.repeats.times: Invalid value: 1"),
        ("[fault.Xid48]\nactoin = 'none'", "fault.Xid48.actoin: Forbidden: unknown field; did"),
    ],
)
def test_what_is_wrong_is_told_at_its_place(text: str, told: str) -> None:
    assert any(told in problem for problem in problems(text)), problems(text)


def test_all_problems_are_told_at_once() -> None:
    assert len(problems("[fault]\nA = { xid = [79] }\nB = { nvml = 'x' }")) >= 8


def test_another_version_is_refused() -> None:
    with pytest.raises(ManifestError, match="version: Unsupported value: 2"):
        load_fault_table([("one", "version = 2")])
    with pytest.raises(ManifestError, match="version: Required value: write version = 1"):
        load_fault_table([("one", "")])


SMALL = f"version = 1\n[fault]\nXid79 = {{ xid = [79], {FAULT} }}\n"


def toml(value: object) -> str:
    """A value as TOML writes it within a line."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case _:
            return json.dumps(value)


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(-1e9, 1e9),
    st.sampled_from(["gpu", "none", "replace", "fatal", "lost", "disk-space", "clock", "(", "x"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["action", "xid", "times", "withinSeconds"]), inner),
    ),
    max_leaves=6,
)
KEYS = [*("title", "class", "action", "source", "xid", "severity", "recovery", "sxid", "kernel")]
KEYS += ["nvml", "host", "counter", "limit", "condition", "afterRepair", "repeats", "beside"]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["A", "Xid79", "a b"]),
        VALUES | st.dictionaries(st.sampled_from([*KEYS, "disabled", "other"]), VALUES),
    )
)
def test_whatever_a_file_says_it_is_read_or_refused(faults: dict[str, object]) -> None:
    try:
        text = "".join(f"fault.{json.dumps(name)} = {toml(one)}\n" for name, one in faults.items())
        load_fault_table([("first", SMALL), ("mine", f"version = 1\n{text}")])
    except ManifestError as refused:
        assert refused.problems


@settings(deadline=None)
@given(st.text(max_size=100))
def test_whatever_a_file_is_it_is_read_or_refused(text: str) -> None:
    try:
        load_fault_table([("any", text)])
    except ManifestError as refused:
        assert refused.problems

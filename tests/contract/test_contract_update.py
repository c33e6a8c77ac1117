"""PUT: versions, generation, immutable fields, and the separation of status and spec."""

from __future__ import annotations

import pytest

from tests.apiclient import Api, Object
from tests.samples import config_map, define, definition, open_schema, pod, widget
from tests.tables import cases


def version(found: Object) -> str:
    """Return the resource version of an object."""
    text: str = found["metadata"]["resourceVersion"]
    return text


def test_update_replaces_and_gives_a_newer_version(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    changed = here.put("configmaps/a", {**made, "data": {"y": "2"}}).made
    assert changed["data"] == {"y": "2"}
    assert int(version(changed)) > int(version(made))
    assert here.get("configmaps/a").made == changed


def test_update_on_a_stale_version_is_409(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    here.put("configmaps/a", {**made, "data": {"x": "2"}}).done()
    answer = here.put("configmaps/a", {**made, "data": {"x": "3"}})
    assert answer.failure == (409, "Conflict")
    assert answer.message == (
        'Operation cannot be fulfilled on configmaps "a": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    assert here.get("configmaps/a").made["data"] == {"x": "2"}


def test_update_without_a_version_is_unconditional(here: Api) -> None:
    here.post("configmaps", config_map("a", x="1")).done()
    assert here.put("configmaps/a", config_map("a", x="2")).made["data"] == {"x": "2"}


def test_custom_resource_needs_a_version(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(here, definition(group, open_schema()))
    here.post(f"{group}/v1:widgets", widget(group, "a")).done()
    answer = here.put(f"{group}/v1:widgets/a", widget(group, "a"))
    assert answer.failure == (422, "Invalid")
    assert ("FieldValueInvalid", "metadata.resourceVersion") in answer.causes
    assert "must be specified for an update" in answer.message


def test_update_that_changes_nothing_keeps_the_version(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    assert here.put("configmaps/a", made).made == made
    assert version(here.get("configmaps/a").made) == version(made)


def test_update_of_what_is_missing_is_404(here: Api) -> None:
    assert here.put("configmaps/none", config_map("none")).failure == (404, "NotFound")


def test_name_of_the_body_must_be_that_of_the_path(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    answer = here.put("configmaps/a", config_map("b"))
    assert answer.failure == (400, "BadRequest")
    assert "does not match the name on the URL" in answer.message


def test_namespace_of_the_body_must_be_that_of_the_path(here: Api) -> None:
    made = here.post("configmaps", config_map("a")).made
    made["metadata"]["namespace"] = "other"
    assert here.put("configmaps/a", made).failure == (400, "BadRequest")


def test_uid_of_another_object_is_409(here: Api) -> None:
    made = here.post("configmaps", config_map("a")).made
    made["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    del made["metadata"]["resourceVersion"]
    answer = here.put("configmaps/a", made)
    assert answer.failure == (409, "Conflict")
    assert "Precondition failed: UID in precondition" in answer.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uid", None),
        ("creationTimestamp", "2001-01-01T00:00:00Z"),
        ("creationTimestamp", None),
        ("generation", 77),
    ],
)
def test_what_the_server_sets_stays(here: Api, field: str, value: object) -> None:
    made = here.post("configmaps", config_map("a")).made
    body = {**made, "metadata": {**made["metadata"], field: value}, "data": {"x": "1"}}
    changed = here.put("configmaps/a", body).made
    assert changed["data"] == {"x": "1"}
    assert changed["metadata"].get(field) == made["metadata"].get(field)


def test_dry_run_changes_nothing(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    answer = here.put("configmaps/a", config_map("a", x="2"), dryRun="All")
    assert answer.made["data"] == {"x": "2"}
    assert here.get("configmaps/a").made == made


def test_generation_grows_with_the_spec_only(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(
        here, definition(group, open_schema(size={"type": "integer"}), subresources={"status": {}})
    )
    what = f"{group}/v1:widgets"
    made = here.post(what, widget(group, "a", spec={"size": 1})).made
    assert made["metadata"]["generation"] == 1
    made["metadata"]["labels"] = {"x": "y"}
    made = here.put(f"{what}/a", made).made
    assert made["metadata"]["generation"] == 1
    made["spec"]["size"] = 2
    made = here.put(f"{what}/a", made).made
    assert made["metadata"]["generation"] == 2
    made["status"] = {"size": 1}
    assert here.put(f"{what}/a/status", made).made["metadata"]["generation"] == 2


def test_status_is_not_changed_through_the_object(here: Api) -> None:
    made = here.post("pods", pod("a")).made
    made["status"]["phase"] = "Running"
    made["metadata"]["labels"] = {"x": "y"}
    changed = here.put("pods/a", made).made
    assert (changed["status"]["phase"], changed["metadata"]["labels"]) == ("Pending", {"x": "y"})


def test_spec_is_not_changed_through_the_status(here: Api) -> None:
    made = here.post("pods", pod("a")).made
    made["spec"]["containers"][0]["image"] = "other"
    made["status"]["phase"] = "Running"
    changed = here.put("pods/a/status", made).made
    assert changed["spec"]["containers"][0]["image"] == "busybox"
    assert changed["status"]["phase"] == "Running"


def test_labels_are_not_changed_through_the_status_of_a_custom_resource(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(here, definition(group, open_schema(), subresources={"status": {}}))
    made = here.post(f"{group}/v1:widgets", widget(group, "a", status={"x": 1})).made
    assert "status" not in made
    made["metadata"]["labels"] = {"x": "y"}
    changed = here.put(f"{group}/v1:widgets/a/status", {**made, "status": {"x": 2}}).made
    assert (changed["status"], changed["metadata"].get("labels")) == ({"x": 2}, None)


def test_stale_version_of_a_status_is_409(here: Api) -> None:
    made = here.post("pods", pod("a")).made
    here.put("pods/a/status", {**made, "status": {"phase": "Running"}}).done()
    answer = here.put("pods/a/status", {**made, "status": {"phase": "Failed"}})
    assert answer.failure == (409, "Conflict")


@cases
def test_immutable_field_is_422(
    here: Api, what: str, body: Object, change: Object, field: str
) -> None:
    made = here.post(what, body).made
    answer = here.patch("merge", f"{what}/a", change)
    assert answer.failure == (422, "Invalid")
    assert field in {found for _, found in answer.causes}
    assert here.get(f"{what}/a").made == made


def test_refusal_of_a_pod_update_says_what_may_change(here: Api) -> None:
    here.post("pods", pod("a")).done()
    answer = here.patch("merge", "pods/a", {"spec": {"restartPolicy": "Never"}})
    assert answer.causes == {("FieldValueForbidden", "spec")}
    assert "pod updates may not change fields other than" in answer.message
    assert "`spec.containers[*].image`" in answer.message


@pytest.mark.parametrize(
    "change",
    [
        [{"op": "replace", "path": "/spec/containers/0/image", "value": "other"}],
        [{"op": "add", "path": "/spec/activeDeadlineSeconds", "value": 5}],
        [{"op": "add", "path": "/spec/tolerations/-", "value": {"key": "x", "operator": "Exists"}}],
    ],
    ids=["image", "deadline", "toleration"],
)
def test_some_of_a_pod_may_change(here: Api, change: Object) -> None:
    made = here.post("pods", pod("a")).made
    assert here.patch("json", "pods/a", change).made["spec"] != made["spec"]


def test_managed_fields_tell_who_updated_what(here: Api) -> None:
    here.post("configmaps", config_map("a", x="1"), fieldManager="maker").done()
    body = config_map("a", x="1", y="2")
    found = here.put("configmaps/a", body, fieldManager="changer").made["metadata"]
    managers = {each["manager"]: each for each in found["managedFields"]}
    assert set(managers) == {"maker", "changer"}
    assert managers["maker"]["operation"] == managers["changer"]["operation"] == "Update"
    assert managers["changer"]["fieldsV1"] == {"f:data": {"f:y": {}}}
    assert managers["maker"]["fieldsV1"] == {"f:data": {".": {}, "f:x": {}}}
    assert managers["maker"]["fieldsType"] == "FieldsV1"
    assert managers["maker"]["apiVersion"] == "v1"


def test_manager_is_named_by_the_user_agent(here: Api) -> None:
    headers = {"User-Agent": "tool/v1.2 (linux)"}
    made = here.send("POST", "configmaps", config_map("a", x="1"), headers=headers).made
    assert made["metadata"]["managedFields"][0]["manager"] == "tool"


def test_managed_fields_can_be_cleared(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    made["metadata"]["managedFields"] = [{}]
    assert "managedFields" not in here.put("configmaps/a", made).made["metadata"]


def test_manager_of_a_status_is_kept_apart(here: Api) -> None:
    here.post("pods", pod("a"), fieldManager="maker").done()
    change = {"status": {"phase": "Running"}}
    found = here.patch("merge", "pods/a/status", change, fieldManager="kubelet").made
    entry = next(e for e in found["metadata"]["managedFields"] if e["manager"] == "kubelet")
    assert entry["fieldsV1"] == {"f:status": {"f:phase": {}}}
    assert entry.get("subresource") == ("status" if here.minor >= 22 else None)

"""The chart's life on a real API server: install, upgrade, rollback, uninstall."""

from __future__ import annotations

import shutil
from pathlib import Path

import helm_python
import pytest
import yaml

from tests.deploy.charts import CHART, NAMESPACE, Object
from tests.deploy.planes import Plane
from unbroken.core.checkpoint_memory import SERVICE

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

OPERATOR = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/unbroken-operator"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MACHINES = "/apis/unbroken.dev/v1/machines"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/unbroken-operator"
CHECKPOINTS = SERVICE.partition(".")[0]
POLICY = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies/unbroken-operator"


def newer(folder: Path) -> Path:
    """Make the chart of a later version, whose Machines have one more column."""
    chart = folder / "unbroken"
    shutil.copytree(CHART, chart)
    file = chart / "files/crds/machines.unbroken.dev.yaml"
    definition = yaml.safe_load(file.read_text())
    column = {"name": "Later", "type": "string", "jsonPath": ".metadata.name"}
    definition["spec"]["versions"][0]["additionalPrinterColumns"].append(column)
    file.write_text(yaml.safe_dump(definition))
    about = chart / "Chart.yaml"
    about.write_text(about.read_text().replace("version: 0.1.0", "version: 0.2.0"))
    return chart


def columns(plane: Plane) -> list[str]:
    """Return the columns of Machines in the server's definition."""
    found = plane.api.get(f"{DEFINITIONS}/machines.unbroken.dev").made
    return [one["name"] for one in found["spec"]["versions"][0]["additionalPrinterColumns"]]


def is_established(definition: Object) -> bool:
    """Return whether the server serves the kind."""
    conditions = definition.get("status", {}).get("conditions", ())
    return any((one["type"], one["status"]) == ("Established", "True") for one in conditions)


def test_a_release_lives_and_what_people_made_outlives_it(plane: Plane, tmp_path: Path) -> None:
    made = plane.install({})
    assert (made["status"], made["revision"]) == ("deployed", 1)
    for name in ("hyperpodpytorchjobs.sagemaker.amazonaws.com", "machines.unbroken.dev"):
        plane.wait(f"{DEFINITIONS}/{name}", is_established)
    first = plane.api.get(OPERATOR).made
    assert first["spec"]["replicas"] == 2
    assert plane.get(POLICY) is not None
    before = columns(plane)
    machine = {
        "apiVersion": "unbroken.dev/v1",
        "kind": "Machine",
        "metadata": {"name": "kept"},
        "spec": {},
    }
    plane.api.post(MACHINES, machine).done()

    # An upgrade changes the definitions, too, and takes the rights of what is turned off.
    later = str(newer(tmp_path))
    values = {
        "operator": {"replicas": 3},
        "nodes": {"enabled": False},
        "networkPolicy": {"enabled": False},
    }
    assert plane.helm.upgrade(later, "unbroken", values)["revision"] == 2
    assert columns(plane) == [*before, "Later"]
    changed = plane.api.get(OPERATOR).made
    assert changed["spec"]["replicas"] == 3
    assert changed["metadata"]["uid"] == first["metadata"]["uid"]
    assert "machines" not in str(plane.api.get(ROLE).made["rules"])
    assert plane.get(POLICY) is None

    plane.helm.rollback("unbroken", version=1)
    assert columns(plane) == before
    assert plane.api.get(OPERATOR).made["spec"]["replicas"] == 2
    assert "machines" in str(plane.api.get(ROLE).made["rules"])
    assert [one["status"] for one in plane.helm.history("unbroken")][-1] == "deployed"

    plane.helm.uninstall("unbroken")
    for path in (OPERATOR, ROLE, "/api/v1/namespaces/unbroken-system"):
        plane.gone(path)
    kept = plane.api.get(f"{MACHINES}/kept").made
    assert kept["spec"] == {}

    # Installed again, it takes over what it has left.
    assert plane.install({})["status"] == "deployed"
    assert plane.api.get(f"{MACHINES}/kept").made["metadata"]["uid"] == kept["metadata"]["uid"]


def test_a_second_release_on_the_cluster_is_refused(plane: Plane) -> None:
    if not plane.helm.list():
        plane.install({})
    with pytest.raises(helm_python.HelmError, match=r"unbroken.*cannot be imported"):
        plane.install({}, name="unbroken-too")


def test_the_checkpoint_memory_has_one_owner(plane: Plane) -> None:
    on: Object = {"checkpointMemory": {"enabled": True}}
    if plane.helm.list():
        plane.helm.upgrade(str(CHART), "unbroken", on)
    else:
        plane.install(on)
    service = plane.api.get(f"/api/v1/namespaces/{NAMESPACE}/services/{CHECKPOINTS}").made
    assert service["spec"]["clusterIP"] == "None"
    daemons = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/checkpoint-memory"
    pod = plane.api.get(daemons).made["spec"]["template"]["spec"]
    (volume,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "checkpoints")
    assert volume == {"medium": "Memory", "sizeLimit": "16640Mi"}
    # All else of it is off or has another name.
    off: Object = {"enabled": False}
    other: Object = {
        **on,
        **dict.fromkeys(("nodes", "nodeDaemon", "webhook", "networkPolicy", "metrics"), off),
        "crds": {"install": False},
        "operator": {"namespace": NAMESPACE, "podDisruptionBudget": False},
    }
    with pytest.raises(helm_python.HelmError, match=rf"{CHECKPOINTS}.*cannot be imported"):
        plane.install(other, name="other")
    plane.helm.upgrade(str(CHART), "unbroken", {"checkpointMemory": off})
    plane.gone(daemons)

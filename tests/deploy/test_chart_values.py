"""Examples of the chart's values, and the README of the chart."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.apiservers import ROOT
from tests.deploy.charts import of_kind, pod_of, render
from tests.tools import tool

EXAMPLES = {path.stem: path for path in sorted((ROOT / "deploy/helm/examples").glob("*.yaml"))}


def rendered(name: str) -> list[dict[str, Any]]:
    """Return every object of the chart with the values of an example."""
    return render(yaml.safe_load(EXAMPLES[name].read_text()))


def test_there_are_values_for_each_kind_of_cluster() -> None:
    assert EXAMPLES.keys() == {"eks", "gke", "kind", "on-prem"}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_values_of_an_example_render(name: str) -> None:
    found = rendered(name)
    given = yaml.safe_load(EXAMPLES[name].read_text())
    (operator,) = (
        one for one in of_kind(found, "Deployment") if one["metadata"]["name"].endswith("operator")
    )
    (container,) = pod_of(operator)["containers"]
    assert container["image"].startswith(f"{given['image']['repository']}:")
    daemons = of_kind(found, "DaemonSet")
    assert bool(daemons) == given.get("nodeDaemon", {}).get("enabled", True)


def test_the_examples_do_what_their_comments_say() -> None:
    def words(name: str) -> str:
        (operator,) = (
            one
            for one in of_kind(rendered(name), "Deployment")
            if one["metadata"]["name"].endswith("operator")
        )
        return " ".join(pod_of(operator)["containers"][0].get("args", [])) + " ".join(
            pod_of(operator)["containers"][0]["command"]
        )

    assert "--node-provider=karpenter" in words("eks")
    assert "--node-command=/opt/repair/repair.sh --host={node}" in words("on-prem")
    (daemon,) = of_kind(rendered("gke"), "DaemonSet")
    assert pod_of(daemon)["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-h100-80gb"
    }
    assert not of_kind(rendered("kind"), "PodDisruptionBudget")
    assert not of_kind(rendered("kind"), "NetworkPolicy")


def test_the_readme_of_the_chart_has_every_value() -> None:
    made = tool("chart_readme")
    assert made.README.read_text() == made.text(), "run tools/chart_readme.py"
    assert "| `operator.replicas` | `2` |" in made.text()


def test_descriptions_of_values_are_sentences() -> None:
    made = tool("chart_readme").text()
    rows = [line.split(" | ") for line in made.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    for name, _, meaning in rows:
        assert len(meaning.split()) >= 4, name
        assert meaning.removesuffix(" |").endswith("."), name

"""Write deploy/node-daemon.yaml, for clusters without Helm, from the chart's node daemon."""

from __future__ import annotations

from pathlib import Path

import helm_python

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/unbroken"
FILE = ROOT / "deploy/node-daemon.yaml"
HEAD = """\
# The node daemon on every node: it sees faults and writes them on its own Node; docs/guide/
# node-faults.md.  Written by tools/node_daemon_manifest.py from the chart, which has it built in.
#
#   kubectl apply -f deploy/node-daemon.yaml
#
# `image` is one that holds this package, with `unbroken` on its PATH (deploy/Containerfile).
"""
OF_HELM = ("helm.sh/chart:", "app.kubernetes.io/managed-by:", "app.kubernetes.io/instance:")
"""Labels that say something of a release only."""


def text() -> str:
    """What the file should hold."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(name="unbroken", namespace="none")
    lines = rendered["unbroken/templates/node-daemon.yaml"].strip().splitlines()
    kept = (line for line in lines if not line.strip().startswith(OF_HELM))
    return HEAD + "\n".join(kept) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(FILE.relative_to(ROOT))

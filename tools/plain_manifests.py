"""Write the manifests of deploy/ for clusters without Helm, from the chart."""

from __future__ import annotations

from pathlib import Path

import helm_python

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/unbroken"
HEAD = """\
# The node daemon on every node: it sees faults and writes them on its own Node; docs/guide/
# node-faults.md.  Written by tools/plain_manifests.py from the chart, which has it built in.
#
#   kubectl apply -f deploy/node-daemon.yaml
#   kubectl apply -f deploy/node-daemon-policy.yaml    # Kubernetes 1.30 and newer
#
# `image` is one that holds this package, with `unbroken` on its PATH (deploy/Containerfile).
"""
POLICY_HEAD = """\
# Lets each node daemon change only the Node that it runs on: docs/guide/security.md.
# Written by tools/plain_manifests.py from the chart.  Needs Kubernetes 1.30 or newer.
#
#   kubectl apply -f deploy/node-daemon-policy.yaml
"""
RUNTIME_HEAD = """\
# TrainJobs that name this runtime run as HyperPodPyTorchJobs: docs/guide/trainjob.md.  Written by
# tools/plain_manifests.py from the chart, which has it built in (`trainer.runtime`).
#
#   kubectl apply --server-side -f deploy/trainer-runtime.yaml
#
# It needs the definitions of Kubeflow Trainer, and an operator with the part `trainer`.  `image` is
# any image with /bin/sh.
"""
FILES = {
    "node-daemon.yaml": HEAD,
    "node-daemon-policy.yaml": POLICY_HEAD,
    "trainer-runtime.yaml": RUNTIME_HEAD,
}
"""Files of deploy/ with their heads; templates of the chart have the same names."""
OF_HELM = ("helm.sh/chart:", "app.kubernetes.io/managed-by:", "app.kubernetes.io/instance:")
"""Labels that say something of a release only."""


def texts() -> dict[Path, str]:
    """The files with what they should hold."""
    with helm_python.Chart.load(CHART) as chart:
        values = {"trainer": {"runtime": True}}
        rendered = chart.render(values, name="unbroken", namespace="none")
    found = {}
    for name, head in FILES.items():
        lines = rendered[f"unbroken/templates/{name}"].strip().splitlines()
        kept = (line for line in lines if not line.strip().startswith(OF_HELM))
        found[ROOT / "deploy" / name] = head + "\n".join(kept) + "\n"
    return found


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
        print(path.relative_to(ROOT))

"""Our own kinds, and Kubeflow's, as the Kubernetes client knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_global_resource,
    create_namespaced_resource,
)

from unbroken.spec.job import incident
from unbroken.spec.job import types as job
from unbroken.spec.kubeflow import pytorchjob
from unbroken.spec.nodes import kinds

if TYPE_CHECKING:

    class JobObject(GenericNamespacedResource):
        """A HyperPodPyTorchJob; a dict."""

    class IncidentObject(GenericNamespacedResource):
        """An Incident; a dict."""

    class PyTorchJobObject(GenericNamespacedResource):
        """Kubeflow's PyTorchJob; a dict."""

    class ClusterObject(GenericGlobalResource):
        """A Cluster; a dict."""

    class MachineObject(GenericGlobalResource):
        """A Machine; a dict."""

    class NodeCheckObject(GenericGlobalResource):
        """A NodeCheck; a dict."""

    class NodeRecordObject(GenericGlobalResource):
        """A NodeRecord; a dict."""

else:
    JobObject = create_namespaced_resource(job.GROUP, job.VERSION, job.KIND, job.PLURAL)
    IncidentObject = create_namespaced_resource(
        incident.GROUP, incident.VERSION, incident.KIND, incident.PLURAL
    )
    PyTorchJobObject = create_namespaced_resource(
        pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.KIND, pytorchjob.PLURAL
    )
    ClusterObject, MachineObject, NodeCheckObject, NodeRecordObject = (
        create_global_resource(incident.GROUP, incident.VERSION, one.kind, one.plural)
        for one in (kinds.CLUSTER, kinds.MACHINE, kinds.NODE_CHECK, kinds.NODE_RECORD)
    )

JOBS = f"apis/{job.GROUP}/{job.VERSION}"
INCIDENTS = f"apis/{incident.GROUP}/{incident.VERSION}"

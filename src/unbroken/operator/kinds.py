"""Kinds of objects as classes of the Kubernetes client."""

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
from unbroken.spec.job_kinds import JobKind
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND
from unbroken.spec.nodes import kinds

if TYPE_CHECKING:

    class JobObject(GenericNamespacedResource):
        """A HyperPodPyTorchJob; a dict."""

    class IncidentObject(GenericNamespacedResource):
        """An Incident; a dict."""

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
    ClusterObject, MachineObject, NodeCheckObject, NodeRecordObject = (
        create_global_resource(incident.GROUP, incident.VERSION, one.kind, one.plural)
        for one in (kinds.CLUSTER, kinds.MACHINE, kinds.NODE_CHECK, kinds.NODE_RECORD)
    )

JOBS = f"apis/{job.GROUP}/{job.VERSION}"
INCIDENTS = f"apis/{incident.GROUP}/{incident.VERSION}"


def job_class(kind: JobKind) -> type[GenericNamespacedResource]:
    """Return the class of jobs of a kind; its objects are dicts."""
    return create_namespaced_resource(kind.group, kind.version, kind.name, kind.plural)


def runtime_class() -> type[GenericGlobalResource]:
    """Return the class of ClusterTrainingRuntimes; its objects are dicts."""
    kind = RUNTIME_KIND
    return create_global_resource(kind.group, kind.version, kind.name, kind.plural)

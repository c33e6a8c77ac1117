"""Our own kinds as the Kubernetes client knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource

from unbroken.spec import incident, job

if TYPE_CHECKING:

    class JobObject(GenericNamespacedResource):
        """A HyperPodPyTorchJob; a dict."""

    class IncidentObject(GenericNamespacedResource):
        """An Incident; a dict."""

else:
    JobObject = create_namespaced_resource(job.GROUP, job.VERSION, job.KIND, job.PLURAL)
    IncidentObject = create_namespaced_resource(
        incident.GROUP, incident.VERSION, incident.KIND, incident.PLURAL
    )

JOBS = f"apis/{job.GROUP}/{job.VERSION}"
INCIDENTS = f"apis/{incident.GROUP}/{incident.VERSION}"

"""The certificate of the cluster API over upgrades of the chart, on a real API server."""

from __future__ import annotations

import pytest

from tests.deploy.charts import CHART, NAMESPACE, Object
from tests.deploy.planes import Plane

pytestmark = [pytest.mark.slow, pytest.mark.realkube]

SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/unbroken-cluster-api-tls"


def values(**more: object) -> Object:
    return {"clusterApi": {"enabled": True, "credentialsSecret": "keys", **more}}


def test_the_certificate_stays_over_upgrades(plane: Plane) -> None:
    plane.install(values())
    first = plane.api.get(SECRET).made
    assert first["type"] == "kubernetes.io/tls"
    plane.helm.upgrade(str(CHART), "unbroken", values(replicas=2))
    assert plane.api.get(SECRET).made["data"] == first["data"]

    # To get a new certificate, delete the Secret.
    plane.api.delete(SECRET).done()
    plane.helm.upgrade(str(CHART), "unbroken", values())
    assert plane.api.get(SECRET).made["data"] != first["data"]

    plane.helm.upgrade(str(CHART), "unbroken", values(tls={"secretName": "mine"}))
    plane.gone(SECRET)

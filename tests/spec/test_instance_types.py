"""The table of instance types: what it says, and what is said of what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.errors import SpecError
from unbroken.kube.quantity import parse_quantity
from unbroken.operator.instance_types import instance_types
from unbroken.spec.nodes.instance_types import (
    InstanceType,
    instance_type,
    instance_type_labels,
    read_instance_types,
)

DOCUMENTED = Path(__file__).with_name("documented_instance_types.txt")
"""Types that the documents of SageMaker name, one a line."""


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        (
            "ml.p5.48xlarge",
            {
                **{"cpu": "192", "memory": "2097152Mi"},
                **{"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"},
            },
        ),
        (
            "ml.trn1.32xlarge",
            {
                **{"cpu": "128", "memory": "524288Mi"},
                **{"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"},
            },
        ),
        ("ml.c5n.large", {"cpu": "2", "memory": "5376Mi"}),
        ("ml.t3.medium", {"cpu": "2", "memory": "4096Mi"}),
    ],
)
def test_a_type_gives_its_capacity(name: str, capacity: dict[str, str]) -> None:
    assert instance_type(instance_types(), name).capacity == capacity


def test_every_amount_is_a_quantity_and_accelerators_have_a_kind() -> None:
    assert len(instance_types()) > 200
    for name, found in instance_types().items():
        assert name.startswith("ml.")
        assert all(parse_quantity(amount) > 0 for amount in found.capacity.values()), name
        assert bool(found.gpus) == bool(found.gpu), name


def test_the_table_has_only_documented_types() -> None:
    documented = set(DOCUMENTED.read_text().split())
    assert not instance_types().keys() - documented
    assert {name.split(".")[1] for name in documented - instance_types().keys()} == {"g7"}


def test_an_unknown_type_is_refused_with_what_to_write() -> None:
    with pytest.raises(SpecError, match=r"ml\.p5\.49xlarge has; similar: .*ml\.p5\.48xlarge"):
        instance_type(instance_types(), "ml.p5.49xlarge")
    with pytest.raises(SpecError, match=r"write it as ml\.p5\.48xlarge"):
        instance_type(instance_types(), "p5.48xlarge")


def test_the_labels_have_the_whole_name() -> None:
    assert instance_type_labels("ml.g5.xlarge") == {
        "node.kubernetes.io/instance-type": "ml.g5.xlarge",
        "beta.kubernetes.io/instance-type": "ml.g5.xlarge",
    }


def test_what_is_wrong_in_a_table_is_named() -> None:
    text = '[types]\n"ml.a.large" = { cpu = 0, memoryGib = 4 }\n"ml.b.large" = { memoryGib = 4 }'
    with pytest.raises(SpecError, match=r"ml\.a\.large\.cpu.*ml\.b\.large\.cpu"):
        read_instance_types(text)
    with pytest.raises(SpecError, match="instance types: "):
        read_instance_types("[types")
    assert read_instance_types('[types]\n"ml.c.large" = { cpu = 2, memoryGib = 4 }') == {
        "ml.c.large": InstanceType(2, 4)
    }

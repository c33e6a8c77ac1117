"""The table of instance types that comes with this project."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from unbroken.spec.nodes.instance_types import InstanceType, read_instance_types


@cache
def instance_types() -> Mapping[str, InstanceType]:
    """Return instance types by name, such as `ml.p5.48xlarge`."""
    text = files("unbroken.operator").joinpath("data/instance_types.toml").read_text("utf-8")
    return MappingProxyType(read_instance_types(text))

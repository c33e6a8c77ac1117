#!/usr/bin/env python3
"""Write the shapes of the cluster API: what each operation takes and answers, with all limits.

    tools/cluster_api_shapes.py API.txt INSTANCE_TYPES.txt

writes src/unbroken/cluster_api/data/shapes.json.  API.txt lists the public service model of
SageMaker's cluster operations (API version 2017-07-24) as text, an operation after another:

    # OP NAME
    ## SHAPE [UNION] required=['MEMBER', ...]
      MEMBER*: SHAPE :: TYPE [min=N] [max=N] [enum=A|B] [pattern=REST OF THE LINE]
      -- elem SHAPE :: TYPE ...                the elements of the list in the lines before
      -- map key TYPE ... [value TYPE ...]     keys and values of the map in the lines before

INSTANCE_TYPES.txt has the values of ClusterInstanceType, one a line.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "src/unbroken/cluster_api/data/shapes.json"
VERSION = "2017-07-24"
INPUTS = ("Request", "Input")
OUTPUTS = ("Response", "Output")
MEMBER = re.compile(r"  (\w+)(\*?): (\w+) :: (.+)")
ELEMENT = re.compile(r"  -- elem (\w+) :: (.+)")
KEY_AND_VALUE = re.compile(r"  -- map key (.+?)(?: value (.+))?")
STRUCTURE = re.compile(r"## (\w+) (UNION)? ?required=\[(.*)\]")


def limits(text: str, instance_types: list[str]) -> dict[str, Any]:
    """A shape from what stands behind `::`."""
    kind, _, rest = text.partition(" ")
    shape: dict[str, Any] = {}
    generic = re.fullmatch(r"(\w+)<(\w+)(?:,(\w+))?>", kind)
    if generic is None:
        shape["type"] = kind
    elif generic[1] == "list":
        shape.update(type="list", member=generic[2])
    else:
        shape.update(type="map", key=generic[2], value=generic[3])
    rest, has_pattern, pattern = rest.partition("pattern=")
    if has_pattern:
        shape["pattern"] = pattern
    for part in rest.replace("<209 values, see sagemaker-instance-types.txt>", "<types>").split():
        name, _, value = part.partition("=")
        if name == "enum":
            shape["enum"] = instance_types if value == "<types>" else value.split("|")
        elif name in ("min", "max"):
            shape[name] = int(value)
    return shape


def parse(text: str, instance_types: list[str]) -> dict[str, Any]:
    """The operations and shapes of the text; ValueError for what is contradictory or missing."""
    operations: dict[str, dict[str, str]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    operation, last_map = "", ""

    def put(name: str, shape: dict[str, Any]) -> None:
        if shapes.setdefault(name, shape) != shape:
            raise ValueError(f"{name} is {shapes[name]} and {shape}")

    for line in text.splitlines():
        if line.startswith("# OP "):
            operation = line[5:].strip()
            operations[operation] = {}
        elif found := STRUCTURE.fullmatch(line):
            name = found[1]
            for role, endings in (("input", INPUTS), ("output", OUTPUTS)):
                if any(name == operation + ending for ending in endings):
                    operations[operation][role] = name
            current = {"type": "structure", "members": {}}
            if found[3]:
                current["required"] = re.findall(r"'(\w+)'", found[3])
            if found[2]:
                current["union"] = True
            if name in shapes and "members" in shapes[name]:
                current = {"type": "structure", "members": {}}  # documented a second time
            else:
                shapes[name] = current
        elif found := MEMBER.fullmatch(line):
            member, _, shape, told = found.groups()
            current["members"][member] = shape
            if not told.startswith("structure"):
                put(shape, limits(told, instance_types))
            last_map = shape if told.startswith("map<") else last_map
        elif found := ELEMENT.fullmatch(line):
            put(found[1], limits(found[2], instance_types))
        elif found := KEY_AND_VALUE.fullmatch(line):
            put(shapes[last_map]["key"], limits(found[1], instance_types))
            if found[2]:
                put(shapes[last_map]["value"], limits(found[2], instance_types))
        elif line.strip() and not line.startswith("//"):
            raise ValueError(f"not understood: {line}")
    # The listing leaves the values of labels out: they are those of a taint's value.
    shapes.setdefault("ClusterKubernetesLabelValue", shapes["ClusterKubernetesTaintValue"])
    shapes.setdefault("ActiveClusterOperationCount", {"type": "integer", "min": 1})
    _complete(shapes)
    return {"version": VERSION, "operations": operations, "shapes": shapes}


def _complete(shapes: dict[str, dict[str, Any]]) -> None:
    for name, shape in shapes.items():
        used = [*shape.get("members", {}).values()]
        used += [shape[part] for part in ("member", "key", "value") if part in shape]
        missing = sorted(set(used) - shapes.keys())
        if missing:
            raise ValueError(f"{name} uses {missing}, which nothing describes")


def write(found: dict[str, Any]) -> str:
    """JSON with a shape a line, so that changes can be read."""
    lines = []
    for part in ("operations", "shapes"):
        entries = sorted(found[part].items())
        inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries)
        lines.append(f' "{part}": {{\n{inner}\n }}')
    return f'{{\n "version": "{found["version"]}",\n' + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Read both files, write the shapes."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    text, types = (Path(name).read_text() for name in sys.argv[1:])
    found = parse(text, types.split())
    TARGET.write_text(write(found))
    print(f"{TARGET}: {len(found['operations'])} operations, {len(found['shapes'])} shapes")


if __name__ == "__main__":
    main()

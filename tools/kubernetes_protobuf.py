#!/usr/bin/env python3
"""Write the protobuf field numbers of kinds that clients may send to the local API server.

    tools/kubernetes_protobuf.py KUBECTL SOURCE
        writes src/unbroken/local/apiserver/data/protobuf.json.gz

KUBECTL is the program of Kubernetes v1.33 (Apache-2.0): it carries the compiled descriptors of all
`generated.proto` files.  (From v1.35 on it does not: gogo/protobuf is gone.)  SOURCE is an unpacked
source of Kubernetes, of any version: the Go types in it say which fields are pointers, which no
descriptor knows.  Debian's source package `kubernetes` (v1.20) is enough; `YOUNGER` lists the newer
fields.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "src/unbroken/local/apiserver/data"
TARGET = DATA / "protobuf.json.gz"
META = "k8s.io.apimachinery.pkg.apis.meta.v1."
KINDS = {
    "v1": "Namespace Pod Node Event ConfigMap Secret Service Endpoints ServiceAccount "
    "PersistentVolumeClaim PersistentVolume Binding",
    "authentication.k8s.io/v1": "TokenReview TokenRequest SelfSubjectReview",
    "authorization.k8s.io/v1": "SelfSubjectAccessReview SelfSubjectRulesReview "
    "SubjectAccessReview LocalSubjectAccessReview",
    "autoscaling/v1": "Scale",
    "batch/v1": "Job",
    "coordination.k8s.io/v1": "Lease",
    "discovery.k8s.io/v1": "EndpointSlice",
    "events.k8s.io/v1": "Event",
    "policy/v1": "Eviction PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "scheduling.k8s.io/v1": "PriorityClass",
    "storage.k8s.io/v1": "StorageClass",
}
RUNTIME = {
    "k8s.io.apimachinery.pkg.runtime.Unknown": {
        1: ["typeMeta", "k8s.io.apimachinery.pkg.runtime.TypeMeta", "kept"],
        2: ["raw", "raw", "kept"],
        3: ["contentEncoding", "string", "kept"],
        4: ["contentType", "string", "kept"],
    },
    # An empty name: the field is the whole value of its message.
    META + "FieldsV1": {1: ["", "json", "kept"]},
    "k8s.io.apimachinery.pkg.api.resource.Quantity": {1: ["", "string", "kept"]},
}
RENAMED = {("k8s.io.api.authentication.v1.BoundObjectReference", 4): "uid"}
YOUNGER = {
    "metadata",
    "spec",
    "status",
    "conditions",
    "observedGeneration",
    "minReadySeconds",
    "readOnly",
}
"""Fields of types that SOURCE may lack and that are no pointers; other numbers, booleans and
messages there are (types.go of k8s.io/api v0.33)."""
SCALARS = {3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes"}
MESSAGE, REPEATED = 11, 3
FIELD = re.compile(
    r'\s+(?:\w+\s+)?(?P<type>\S+)\s+`json:"(?P<json>[^"]*)".*protobuf:"\w+,(?P<number>\d+),'
)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of one message of a descriptor."""
    at = 0

    def varint() -> int:
        nonlocal at
        shift = value = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise SystemExit(f"a descriptor has a field of wire type {key & 7}")


def descriptors(program: bytes) -> dict[str, tuple[list[dict[int, Any]], bool]]:
    """Return, by message, its FieldDescriptorProtos, and whether it is the entry of a map."""
    found: dict[str, tuple[list[dict[int, Any]], bool]] = {}

    def add(package: str, message: bytes) -> None:
        parts = list(fields(message))
        name = f"{package}.{dict(parts)[1].decode()}"
        is_entry = any(n == 7 and dict(fields(value)).get(7) for n, value in parts)
        found[name] = [dict(fields(value)) for n, value in parts if n == 2], is_entry
        for number, value in parts:
            if number == 3:
                add(name, value)

    for match in re.finditer(b"\x1f\x8b\x08", program):
        try:
            text = zlib.decompressobj(31).decompress(program[match.start() :][:200_000])
        except zlib.error:
            continue
        if text[:1] == b"\n" and b"/generated.proto" in text[:120]:
            file = list(fields(text))
            package = dict(file)[2].decode()
            for number, value in file:
                if number == 4:
                    add(package, value)
    return found


def go_fields(source: Path) -> dict[tuple[str, int], tuple[str, str]]:
    """Go type and JSON tag by name of message and number of field."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for path in sorted((source / "staging/src").glob("k8s.io/api*/**/types.go")):
        package = ".".join(path.parent.relative_to(source / "staging/src").parts)
        struct = ""
        for line in path.read_text().splitlines():
            if match := re.match(r"type (\w+) struct", line):
                struct = match[1]
            elif match := FIELD.match(line):
                found[f"{package}.{struct}", int(match["number"])] = match["type"], match["json"]
    return found


def mode(name: str, kind: str, go: tuple[str, str] | None) -> str:
    """`omitted` where Go's JSON leaves a zero value out, which protobuf always writes."""
    if go:
        return "omitted" if go[0][0] not in "*[" and "omitempty" in go[1] else "kept"
    return "omitted" if kind == "string" or name in YOUNGER else "kept"


def main() -> None:
    """Write the file; deterministic, so that a rerun changes nothing."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    known = descriptors(Path(sys.argv[1]).read_bytes())
    go = go_fields(Path(sys.argv[2]))
    schemas = json.loads(gzip.decompress((DATA / "kubernetes.json.gz").read_bytes()))
    kinds = {"*/DeleteOptions": META + "DeleteOptions"}
    for version, names in KINDS.items():
        group = version.rpartition("/")[0].partition(".")[0] or "core"
        kinds.update(
            {f"{version}/{kind}": f"k8s.io.api.{group}.v1.{kind}" for kind in names.split()}
        )
    table: dict[str, dict[int, list[str]]] = {}
    todo = ["k8s.io.apimachinery.pkg.runtime.Unknown", *kinds.values()]
    while todo:
        message = todo.pop()
        if message in table:
            continue
        table[message] = dict(RUNTIME.get(message, {}))
        for field in () if message in RUNTIME else known[message][0]:
            number, name = field[3], field[1].decode()
            kind = SCALARS[field[5]] if field[5] != MESSAGE else field[6].decode()[1:]
            how = mode(name, kind, go.get((message, number)))
            if field[4] == REPEATED:
                how = "repeated"
                if field[5] == MESSAGE and known[kind][1]:
                    entry = {part[3]: part for part in known[kind][0]}
                    if SCALARS.get(entry[1][5]) != "string":
                        raise SystemExit(f"{kind}: the keys are no strings")
                    how, value = "map", entry[2]
                    kind = SCALARS.get(value[5]) or value[6].decode()[1:]
            schema = schemas.get("io.k8s" + message.removeprefix("k8s.io"), {}).get("properties")
            if name == "items" and schema is None:
                name = ""  # a Go slice with a name, such as ExtraValue
            elif schema and name not in schema:
                name = RENAMED.get((message, number), "")
                how = how if name else "inline"
            table[message][number] = [name, kind, how]
        todo += [kind for _, kind, _ in table[message].values() if "." in kind]
    wholes = sorted(
        message
        for message, entries in table.items()
        if any(not name and how != "inline" for name, _, how in entries.values())
    )
    content = {"kinds": kinds, "messages": table, "wholes": wholes}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(table)} messages, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()

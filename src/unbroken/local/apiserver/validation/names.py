"""Names, labels and the rest of metadata: what Kubernetes takes, and its words for the rest.

Rules and texts follow apimachinery v1.33 (util/validation, api/validation); lengths are still
given in characters, as up to v1.31.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.kinds.kinds import Kind
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

ANNOTATIONS_MAX_BYTES = 256 * 1024
STANDARD_FINALIZERS = ("kubernetes", "orphan", "foregroundDeletion")

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_LABEL_1035 = "[a-z]([-a-z0-9]*[a-z0-9])?"
_NAME = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_VALUE = f"({_NAME})?"
_CONFIG_KEY = "[-._a-zA-Z0-9]+"
_ENV_NAME = "[-._a-zA-Z][-._a-zA-Z0-9]*"
_PATTERNS = {
    text: re.compile(text)
    for text in (_LABEL, _SUBDOMAIN, _LABEL_1035, _NAME, _VALUE, _CONFIG_KEY, _ENV_NAME)
}

NameRule = Callable[[str], list[str]]
"""Says what is wrong with a name; nothing when it is fine."""


def _expected(what: str, pattern: str, *examples: str) -> str:
    shown = ",  or ".join(f"'{example}'" for example in examples)
    return f"{what} (e.g. {shown}, regex used for validation is '{pattern}')"


_LABEL_TEXT = _expected(
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character",
    _LABEL,
    "my-name",
    "123-abc",
)
_SUBDOMAIN_TEXT = _expected(
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character",
    _SUBDOMAIN,
    "example.com",
)
_LABEL_1035_TEXT = _expected(
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an "
    "alphabetic character, and end with an alphanumeric character",
    _LABEL_1035,
    "my-name",
    "abc-123",
)
_NAME_TEXT = _expected(
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character",
    _NAME,
    "MyName",
    "my.name",
    "123-abc",
)
_VALUE_TEXT = _expected(
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character",
    _VALUE,
    "MyValue",
    "my_value",
    "12345",
)
_CONFIG_KEY_TEXT = _expected(
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
    _CONFIG_KEY,
    "key.name",
    "KEY_NAME",
    "key-name",
)
_ENV_NAME_TEXT = _expected(
    "a valid environment variable name must consist of alphabetic characters, digits, '_', '-', "
    "or '.', and must not start with a digit",
    _ENV_NAME,
    "my.env-name",
    "MY_ENV.NAME",
    "MyEnvName1",
)


def _check(text: str, most: int, pattern: str, expected: str) -> list[str]:
    result = [f"must be no more than {most} characters"] if len(text) > most else []
    if not _PATTERNS[pattern].fullmatch(text):
        result.append(expected)
    return result


def dns_label(text: str) -> list[str]:
    """Rule of namespaces and containers: RFC 1123 label."""
    return _check(text, 63, _LABEL, _LABEL_TEXT)


def dns_subdomain(text: str) -> list[str]:
    """Rule of most names: RFC 1123 subdomain."""
    return _check(text, 253, _SUBDOMAIN, _SUBDOMAIN_TEXT)


def dns_1035_label(text: str) -> list[str]:
    """Rule of services: RFC 1035 label."""
    return _check(text, 63, _LABEL_1035, _LABEL_1035_TEXT)


def path_segment(text: str) -> list[str]:
    """Rule of RBAC names: anything that can stand between two slashes of a path."""
    if text in (".", ".."):
        return [f"may not be '{text}'"]
    return [f"may not contain '{part}'" for part in ("/", "%") if part in text]


def qualified_name(text: str) -> list[str]:
    """Rule of label and annotation keys: `name` or `prefix/name`."""
    prefix, slash, name = text.rpartition("/")
    if "/" in prefix:
        shape = "with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
        return [f"a qualified name {_NAME_TEXT} {shape}"]
    result: list[str] = []
    if slash:
        wrong = dns_subdomain(prefix) if prefix else ["must be non-empty"]
        result = [f"prefix part {reason}" for reason in wrong]
    if not name:
        result.append("name part must be non-empty")
    wrong = _check(name, 63, _NAME, _NAME_TEXT)
    return result + [f"name part {reason}" for reason in wrong]


def label_value(text: str) -> list[str]:
    """Rule of label values."""
    return _check(text, 63, _VALUE, _VALUE_TEXT)


def config_key(text: str) -> list[str]:
    """Rule of keys in config maps and secrets."""
    return _check(text, 253, _CONFIG_KEY, _CONFIG_KEY_TEXT) or _not_a_way_up(text)


def environment_name(text: str) -> list[str]:
    """Rule of environment variables (v1.33 takes more, behind a feature gate)."""
    result = [] if _PATTERNS[_ENV_NAME].fullmatch(text) else [_ENV_NAME_TEXT]
    return result + _not_a_way_up(text)


def port_name(text: str) -> list[str]:
    """Rule of the names of container ports (IANA service name)."""
    result = ["must be no more than 15 characters"] if len(text) > 15 else []
    if not re.fullmatch(r"[-a-z0-9]+", text):
        result.append("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)")
    if not re.search(r"[a-z]", text):
        result.append("must contain at least one letter (a-z)")
    if "--" in text:
        result.append("must not contain consecutive hyphens")
    if text[:1] == "-" or text[-1:] == "-":
        result.append("must not begin or end with a hyphen")
    return result


def _not_a_way_up(text: str) -> list[str]:
    if text in (".", ".."):
        return [f"must not be '{text}'"]
    return ["must not start with '..'"] if text.startswith("..") else []


_RULES: Mapping[str, NameRule] = {
    "namespaces": dns_label,
    "services": dns_1035_label,
    "roles.rbac.authorization.k8s.io": path_segment,
    "rolebindings.rbac.authorization.k8s.io": path_segment,
    "clusterroles.rbac.authorization.k8s.io": path_segment,
    "clusterrolebindings.rbac.authorization.k8s.io": path_segment,
}


def name_rule(kind: Kind) -> NameRule:
    """The rule for names of objects of a kind."""
    return _RULES.get(kind.resource, dns_subdomain)


def each(rule: NameRule, path: str, text: str) -> list[Cause]:
    """Return FieldValueInvalid for each violation of a rule by a text."""
    return [invalid_value(path, text, reason) for reason in rule(text)]


def validate_labels(labels: Mapping[str, str], path: str) -> list[Cause]:
    """Keys and values of labels (also of nodeSelector and matchLabels)."""
    causes: list[Cause] = []
    for key, value in sorted(labels.items()):
        causes += each(qualified_name, path, key) + each(label_value, path, value)
    return causes


def validate_metadata(meta: Object, kind: Kind, path: str = "metadata") -> list[Cause]:
    """Everything that is wrong with the metadata of an object of `kind`."""
    causes: list[Cause] = []
    rule = name_rule(kind)
    generate, name = meta.get("generateName") or "", meta.get("name") or ""
    if generate:
        # The ending that is put behind a trailing dash makes the name a valid one.
        whole = generate[:-2] + "a" if len(generate) > 1 and generate[-1] == "-" else generate
        causes += [invalid_value(f"{path}.generateName", generate, text) for text in rule(whole)]
    if name:
        causes += each(rule, f"{path}.name", name)
    else:
        causes.append(required_value(f"{path}.name", "name or generateName is required"))
    namespace = meta.get("namespace") or ""
    if kind.namespaced:
        if namespace:
            causes += each(dns_label, f"{path}.namespace", namespace)
        else:
            causes.append(required_value(f"{path}.namespace"))
    elif namespace:
        causes.append(forbidden(f"{path}.namespace", "not allowed on this type"))
    causes += validate_labels(meta.get("labels") or {}, f"{path}.labels")
    causes += validate_annotations(meta.get("annotations") or {}, f"{path}.annotations")
    causes += _owners(meta.get("ownerReferences") or [], f"{path}.ownerReferences")
    return causes + _finalizers(meta.get("finalizers") or [], kind, f"{path}.finalizers")


def validate_annotations(annotations: Mapping[str, str], path: str) -> list[Cause]:
    """Keys, and the size of all together."""
    causes: list[Cause] = []
    size = 0
    for key, value in sorted(annotations.items()):
        causes += [invalid_value(path, key, text) for text in qualified_name(key.lower())]
        size += len(key.encode()) + len(value.encode())
    if size > ANNOTATIONS_MAX_BYTES:
        text = f"Too long: must have at most {ANNOTATIONS_MAX_BYTES} bytes"
        causes.append(Cause("FieldValueTooLong", path, text))
    return causes


def _owners(owners: list[Any], path: str) -> list[Cause]:
    causes: list[Cause] = []
    controllers: list[str] = []
    for owner in owners:
        group_version = owner.get("apiVersion") or ""
        if not group_version.rpartition("/")[2]:
            text = "version must not be empty"
            causes.append(invalid_value(f"{path}.apiVersion", group_version, text))
        causes += [
            invalid_value(f"{path}.{name}", "", f"{name} must not be empty")
            for name in ("kind", "name", "uid")
            if not owner.get(name)
        ]
        if (group_version, owner.get("kind")) == ("v1", "Event"):
            text = "/v1, Kind=Event is disallowed from being an owner"
            causes.append(invalid_value(path, owner, text))
        if owner.get("controller"):
            controllers.append(owner.get("name") or "")
    if len(controllers) > 1:
        text = (
            'Only one reference can have Controller set to true. Found "true" in references for '
            f"{controllers[0]} and {controllers[1]}"
        )
        causes.append(invalid_value(path, owners, text))
    return causes


def _finalizers(finalizers: list[str], kind: Kind, path: str) -> list[Cause]:
    causes = [cause for name in finalizers for cause in each(qualified_name, path, name)]
    if {"orphan", "foregroundDeletion"} <= {*finalizers}:
        text = "finalizer orphan and foregroundDeletion cannot be both set"
        causes.append(invalid_value(path, finalizers, text))
    if kind.is_custom or kind.group == "apiextensions.k8s.io":
        return causes
    return causes + [
        cause for index, name in enumerate(finalizers) for cause in finalizer(name, path, index)
    ]


def finalizer(name: str, path: str, index: int) -> list[Cause]:
    """Finalizers of built-in kinds have a prefix, or are Kubernetes' own."""
    if "/" in name or name in STANDARD_FINALIZERS:
        return []
    text = "name is neither a standard finalizer name nor is it fully qualified"
    return [invalid_value(f"{path}[{index}]", name, text)]

"""Create, update, patch and delete: one path for every kind.

Each write is checked and completed as a whole, then stored with one INSERT; an error anywhere
stores nothing. A kind's further needs are data in its `Kind` or a rule in `defaults`, `rules` and
`admission`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from unbroken.local.apiserver.http.requests import Target, WriteOptions
from unbroken.local.apiserver.http.status import (
    ApiError,
    Cause,
    Object,
    already_exists,
    bad_request,
    conflict,
    invalid,
)
from unbroken.local.apiserver.kinds import crds
from unbroken.local.apiserver.kinds.kinds import Catalogue, from_storage, to_storage
from unbroken.local.apiserver.schema import structural
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value
from unbroken.local.apiserver.store import Entry, Store, encode
from unbroken.local.apiserver.validation import rules
from unbroken.local.apiserver.validation.names import validate_metadata

from . import admission, deletion
from .apply import server_side_apply, track_update
from .defaults import apply_defaults
from .patch import json_patch, merge_patch, strategic_merge_patch

SERVER_OWNED = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
)
"""Metadata that no client writes: an update takes them from the stored object."""

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PATCHES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH)

APPLIED_TO_STATUS = ("apiVersion", "kind", "metadata", "status")
CRD_RESOURCE = "customresourcedefinitions.apiextensions.k8s.io"
GENERATED_NAME_TRIES = 8
"""Names tried for generateName before AlreadyExists (kube-apiserver v1.30)."""


@dataclass(frozen=True, slots=True)
class WriteContext:
    """Dependencies of the write path: clock, identities, random name endings."""

    clock: Callable[[], float]
    """Seconds since the epoch."""
    new_uid: Callable[[], str]
    new_suffix: Callable[[], str]
    """Five random letters and digits for generateName."""
    admissions: Mapping[str, admission.Admit] = field(default_factory=dict)
    """Judges of custom kinds by resource, such as widgets.example.com."""

    def timestamp(self) -> str:
        """Now, as Kubernetes writes times: whole seconds, UTC."""
        return timestamp(self.clock())


def timestamp(seconds: float) -> str:
    """RFC 3339 in whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class Result:
    """Result of a write."""

    entry: Entry
    is_new: bool = False
    is_gone: bool = False
    """The object was removed by this write."""
    warnings: list[str] = field(default_factory=list)


class Writer:
    """The write path over one store."""

    def __init__(self, store: Store, catalogue: Catalogue, context: WriteContext) -> None:
        self._store = store
        self._catalogue = catalogue
        self._context = context

    def timestamp(self) -> str:
        """Now, as objects hold it."""
        return self._context.timestamp()

    def create(
        self, target: Target, content: Object, options: WriteOptions, *, is_apply: bool = False
    ) -> Result:
        """Store a new object; ApiError 400, 403, 404, 409 or 422."""
        warnings: list[str] = []
        content = self._understood(target, content, options, warnings)
        meta = content["metadata"]
        if meta.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        for name in (*SERVER_OWNED, "resourceVersion"):
            meta.pop(name, None)
        self._name(target, meta)
        admission.check_namespace(self._store, target)
        if target.version.has_status and not admission.keeps_status(target.kind):
            content.pop("status", None)
        meta["uid"] = self._context.new_uid()
        meta["creationTimestamp"] = self._context.timestamp()
        self._complete(target, content)
        if not is_apply:
            meta["managedFields"] = self._tracked(target, None, content, options)
        if not meta["managedFields"]:
            del meta["managedFields"]
        content = to_storage(target.kind, content)
        content["apiVersion"] = target.kind.api_version(target.kind.storage_version)
        if admission.has_generation(target.kind):
            meta["generation"] = 1
        admission.complete_new(self._store, self._catalogue, target.kind, content)
        self._check(target, None, content, warnings)
        key = (target.namespace, meta["name"])
        if key in self._store.collection(target.kind.storage).entries:
            raise already_exists(target.kind.group, target.kind.plural, meta["name"])
        entry = self._commit(target, key, content, options)
        return Result(entry, is_new=True, warnings=warnings)

    def update(
        self,
        target: Target,
        live: Entry,
        content: Object,
        options: WriteOptions,
        *,
        is_patch: bool = False,
    ) -> Result:
        """Put `content` in the place of `live`; ApiError 409 when it builds on another version."""
        warnings: list[str] = []
        try:
            content = self._understood(target, content, options, warnings)
        except ApiError as error:
            raise (_unfit(error) if is_patch else error) from None
        old = self._present(target, live)
        if not is_patch:
            self._check_uid(target, old["metadata"], content["metadata"])
        self._check_precondition(target, old["metadata"], content["metadata"])
        if target.kind.is_custom and not content["metadata"].get("resourceVersion"):
            raise _version_missing(target, old["metadata"]["name"])
        content = self._carried(target, old, content)
        self._complete(target, content)
        content["metadata"]["managedFields"] = self._tracked(target, old, content, options)
        return self._replace(target, live, old, content, options, warnings)

    def patch(
        self, target: Target, live: Entry, patch_type: str, patch: Any, options: WriteOptions
    ) -> Result:
        """JSON patch, merge patch or strategic merge patch of `live`."""
        if options.force is not None:
            raise _options_invalid("force", "may not be specified for non-apply patch")
        old = self._present(target, live)
        if patch_type == JSON_PATCH:
            new = json_patch(old, patch)
        elif not isinstance(patch, dict):
            raise bad_request("error decoding patch: a patch of this type must be an object")
        elif patch_type == MERGE_PATCH:
            new = merge_patch(old, patch)
        elif target.kind.is_custom:
            raise ApiError(
                415,
                "UnsupportedMediaType",
                "the body of the request was in an unknown format - accepted media types include: "
                "application/json-patch+json, application/merge-patch+json, "
                "application/apply-patch+yaml",
            )
        else:
            new = strategic_merge_patch(old, patch, target.version.schema)
        return self.update(target, live, new, options, is_patch=True)

    def apply(
        self, target: Target, live: Entry | None, applied: Object, options: WriteOptions
    ) -> Result:
        """Server-side apply; creates the object when `live` is None."""
        warnings: list[str] = []
        for name in ("apiVersion", "kind"):
            if not applied.get(name):
                raise bad_request(f"Object '{name.capitalize()}' is missing in the applied object")
        applied = self._understood(target, applied, options, warnings, is_part=True)
        old = self._present(target, live) if live is not None else None
        meta = applied["metadata"]
        if meta.get("name") not in (None, target.name):
            raise _name_mismatch(meta["name"], target.name)
        meta["name"] = target.name
        if target.namespace:
            meta["namespace"] = target.namespace
        # Nobody may own what the request cannot write.
        if target.subresource == "status":
            applied = {key: applied[key] for key in APPLIED_TO_STATUS if key in applied}
        elif target.version.has_status:
            applied.pop("status", None)
        if old is not None:
            self._check_uid(target, old["metadata"], meta)
            self._check_precondition(target, old["metadata"], meta)
        elif meta.get("uid"):
            why = (
                f"uid mismatch: the provided object specified uid {meta['uid']}, "
                "and no existing object was found"
            )
            raise conflict(target.kind.group, target.kind.plural, target.name, why)
        new = server_side_apply(
            old,
            applied,
            target.version.schema,
            manager=options.manager,
            api_version=target.api_version,
            now=self._context.timestamp(),
            force=bool(options.force),
            subresource=target.subresource,
        )
        if live is None or old is None:
            result = self.create(target, new, options, is_apply=True)
        else:
            content = self._carried(target, old, new)
            self._complete(target, content)
            result = self._replace(target, live, old, content, options, warnings)
        result.warnings[:0] = [text for text in warnings if text not in result.warnings]
        return result

    def delete(self, target: Target, live: Entry, options: deletion.DeleteOptions) -> Result:
        """Remove `live`, or mark it for those that must act first (grace, finalizers)."""
        content = live.decode()
        deletion.check_preconditions(target, content, options)
        now = self._context.clock()
        if deletion.mark(target.kind, content, options, now, timestamp):
            return self._remove(target, live, content, options.is_dry_run)
        if encode(content) == live.body:
            return Result(live)
        key, unchanged = live.key, WriteOptions("", is_dry_run=options.is_dry_run)
        return Result(self._commit(target, key, content, unchanged))

    def _remove(self, target: Target, live: Entry, content: Object, is_dry_run: bool) -> Result:
        if is_dry_run:
            return Result(live, is_gone=True)
        entry = self._store.write(target.kind.storage, live.key, content, delete=True)
        return Result(entry, is_gone=True)

    def _replace(
        self,
        target: Target,
        live: Entry,
        old: Object,
        content: Object,
        options: WriteOptions,
        warnings: list[str],
    ) -> Result:
        """Check the finished object and store it if it differs from `live`."""
        meta = content["metadata"]
        if admission.has_generation(target.kind) and _moves_generation(target, old, content):
            meta["generation"] = old["metadata"].get("generation", 0) + 1
        if not meta.get("managedFields"):
            meta.pop("managedFields", None)
        self._check(target, old, content, warnings)
        if content == old:
            return Result(live, warnings=warnings)
        content = to_storage(target.kind, content)
        content["apiVersion"] = target.kind.api_version(target.kind.storage_version)
        if deletion.is_finished(target.kind, content):
            result = self._remove(target, live, content, options.is_dry_run)
            result.warnings = warnings
            return result
        return Result(self._commit(target, live.key, content, options), warnings=warnings)

    def _understood(
        self,
        target: Target,
        content: Object,
        options: WriteOptions,
        warnings: list[str],
        *,
        is_part: bool = False,
    ) -> Object:
        """The object without what its kind does not know; ApiError 400 for wrong types.

        `is_part`: of an object, to be applied.
        """
        _check_identity(target, content)
        schema, is_custom = target.version.schema, target.kind.is_custom
        if not is_custom:
            content = structural.without_nulls(content, schema)
        problem = structural.decode_errors(content, schema, is_custom=is_custom)
        if problem:
            raise bad_request(
                f'{target.kind.kind} in version "{target.version.name}" cannot be handled '
                f"as a {target.kind.kind}: {problem}"
            )
        whole = content
        content, dropped = structural.prune(content, schema)
        if dropped and options.validation != "Ignore" and not is_part:
            # A judge knows what the unknown fields may have meant.
            causes, _ = self._judge(target, None, whole)
            if causes:
                raise _invalid(target, whole, causes)
        content.setdefault("metadata", {})
        unknown = [f'unknown field "{path}"' for path in dropped]
        if unknown and options.validation == "Strict":
            kind, api = target.kind.kind, target.version.name
            raise bad_request(
                f'{kind} in version "{api}" cannot be handled as a {kind}: '
                f"strict decoding error: {', '.join(unknown)}"
            )
        if options.validation == "Warn":
            warnings.extend(unknown)
        if target.version.deprecation:
            warnings.append(target.version.deprecation)
        if target.kind.resource == CRD_RESOURCE:
            causes = crds.validate_definition(content)
            if causes:
                name = content["metadata"].get("name", "")
                raise invalid(target.kind.group, target.kind.kind, name, causes)
            warnings.extend(crds.definition_warnings(content))
        return content

    def _present(self, target: Target, entry: Entry) -> Object:
        """The stored object in the version that the client speaks."""
        content = from_storage(target.kind, entry.decode())
        content["apiVersion"] = target.api_version
        return content

    def _name(self, target: Target, meta: Object) -> None:
        namespace = meta.get("namespace")
        if namespace and namespace != target.namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        if target.namespace:
            meta["namespace"] = target.namespace
        if target.name and meta.get("name") not in (None, "", target.name):
            raise _name_mismatch(meta["name"], target.name)
        if meta.get("name") or not meta.get("generateName"):
            return
        entries = self._store.collection(target.kind.storage).entries
        for _ in range(GENERATED_NAME_TRIES):
            # 58 = 63 - 5 letters of the ending (apiserver v1.33, names.SimpleNameGenerator)
            meta["name"] = meta["generateName"][:58] + self._context.new_suffix()
            if (target.namespace, meta["name"]) not in entries:
                return

    def _check_precondition(self, target: Target, old: Object, new: Object) -> None:
        """The identity and version that the client built on, where it names them."""
        group, plural, name = target.kind.group, target.kind.plural, old["name"]
        if new.get("name") not in (None, "", name):
            raise _name_mismatch(new["name"], name)
        if new.get("namespace") not in (None, "", old.get("namespace", "")):
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        if new.get("resourceVersion") not in (None, "", "0", old["resourceVersion"]):
            raise conflict(
                group,
                plural,
                name,
                "the object has been modified; please apply your changes to the latest version "
                "and try again",
            )

    def _check_uid(self, target: Target, old: Object, new: Object) -> None:
        group, plural, name = target.kind.group, target.kind.plural, old["name"]
        if new.get("uid") not in (None, "", old["uid"]):
            raise conflict(
                group,
                plural,
                name,
                f"Precondition failed: UID in precondition: {new['uid']}, "
                f"UID in object meta: {old['uid']}",
            )

    def _carried(self, target: Target, old: Object, new: Object) -> Object:
        """`new` with everything that this request may not change taken from `old`."""
        if target.subresource == "status":
            kept = dict(old)
            if not target.kind.is_custom:
                kept["metadata"] = dict(new["metadata"])
            kept["metadata"] = {
                **kept["metadata"],
                "managedFields": new["metadata"].get("managedFields"),
            }
            kept.pop("status", None)
            new = {**kept, **({"status": new["status"]} if "status" in new else {})}
        elif target.version.has_status and target.subresource != "binding":
            new = {**new}
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        causes = _frozen_metadata(old["metadata"], new["metadata"])
        if causes:
            raise invalid(target.kind.group, target.kind.kind, old["metadata"]["name"], causes)
        meta = new["metadata"] = dict(new["metadata"])
        for name in (*SERVER_OWNED, "name", "namespace"):
            meta.pop(name, None)
            if name in old["metadata"]:
                meta[name] = old["metadata"][name]
        meta["resourceVersion"] = old["metadata"]["resourceVersion"]
        return new

    def _tracked(
        self, target: Target, old: Object | None, new: Object, options: WriteOptions
    ) -> list[Object]:
        if target.version.has_status and not target.subresource:
            # A write of the object makes no one the manager of fields that it cannot change.
            old = _without_status(old) if old is not None else None
            new = _without_status(new)
        tracked: list[Object] = track_update(
            old,
            new,
            target.version.schema,
            manager=options.manager,
            api_version=target.api_version,
            now=self._context.timestamp(),
            subresource=target.subresource,
        )
        return tracked

    def _complete(self, target: Target, content: Object) -> None:
        if target.kind.resource == CRD_RESOURCE:
            crds.set_defaults(content, self._context.timestamp())
            if "resourceVersion" not in content["metadata"]:
                del content["status"]  # whether its names are free is judged once it is stored
        elif target.kind.is_custom:
            structural.default(content, target.version.schema)
        else:
            apply_defaults(target.kind, content)

    def _judge(
        self, target: Target, old: Object | None, new: Object
    ) -> tuple[list[Cause], tuple[str, ...]]:
        """Causes and warnings of the kind's own judge, if it has one."""
        admit = self._context.admissions.get(target.kind.resource)
        if admit is None or target.subresource == "status":
            return [], ()
        return admission.judge(admit, old, new)

    def _check(self, target: Target, old: Object | None, new: Object, warnings: list[str]) -> None:
        """ApiError 422 with every rule that `new` breaks."""
        kind = target.kind
        causes = validate_metadata(new["metadata"], kind)
        if kind.is_custom:
            judged, told = self._judge(target, old, new)
            places = {cause.field for cause in judged}
            result = structural.validate(new, target.version.schema)
            causes += [*judged, *(cause for cause in result if cause.field not in places)]
            warnings.extend(told)
        elif kind.resource == CRD_RESOURCE:
            causes += crds.validate_update(new, old) if old is not None else []
        else:
            # A binding gives a pod its node, which no other update may.
            before = None if target.subresource == "binding" else old
            causes += rules.validate(kind, before, new)
        if causes:
            raise _invalid(target, new, causes)

    def _commit(
        self, target: Target, key: tuple[str, str], content: Object, options: WriteOptions
    ) -> Entry:
        if options.is_dry_run:
            return Entry(key, self._store.version, encode(content))
        return self._store.write(target.kind.storage, key, content)


def _check_identity(target: Target, content: Object) -> None:
    if not target.kind.is_custom:  # the path has the kind
        content.setdefault("kind", target.kind.kind)
        content.setdefault("apiVersion", target.api_version)
    kind, api_version = content.get("kind"), content.get("apiVersion")
    if not kind or not isinstance(kind, str):
        raise bad_request("Object 'Kind' is missing in the body of the request")
    if not api_version or not isinstance(api_version, str):
        raise bad_request("Object 'apiVersion' is missing in the body of the request")
    if (api_version, kind) != (target.api_version, target.kind.kind):
        raise bad_request(
            f"the API version in the data ({api_version}) and kind ({kind}) do not match the "
            f"expected API version ({target.api_version}) and kind ({target.kind.kind})"
        )
    if not isinstance(content.get("metadata", {}), dict | None):
        raise bad_request("json: cannot unmarshal metadata into an object of type ObjectMeta")


def _invalid(target: Target, content: Object, causes: list[Cause]) -> ApiError:
    meta = content.get("metadata") or {}
    name = meta.get("name") or meta.get("generateName", "")
    return invalid(target.kind.group, target.kind.kind, name, causes)


def _name_mismatch(given: object, expected: str) -> ApiError:
    return bad_request(
        f"the name of the object ({given}) does not match the name on the URL ({expected})"
    )


def _without_status(content: Object) -> Object:
    return {name: value for name, value in content.items() if name != "status"}


def _unfit(error: ApiError) -> ApiError:
    """Return the error for an invalid result of a patch: the patch is invalid, not the request."""
    if error.reason != "BadRequest" or "strict decoding" in error.message:
        return error
    cause = Cause("FieldValueInvalid", "patch", f"Invalid value: {error.message}")
    return invalid("", "", "", [cause])


def _frozen_metadata(old: Object, new: Object) -> list[Cause]:
    """Metadata that no update may change (apimachinery v0.33, ValidateObjectMetaAccessorUpdate)."""
    causes = []
    if new.get("uid") not in (None, "", old["uid"]):
        causes.append(invalid_value("metadata.uid", new["uid"], "field is immutable"))
    if "deletionTimestamp" not in old:
        causes += [
            invalid_value(f"metadata.{name}", new[name], "field is immutable")
            for name in ("deletionTimestamp", "deletionGracePeriodSeconds")
            if new.get(name) is not None
        ]
        return causes
    added = set(new.get("finalizers") or ()) - set(old.get("finalizers") or ())
    if added:
        listed = " ".join(f'"{name}"' for name in sorted(added))
        text = (
            "no new finalizers can be added if the object is being deleted, found new finalizers "
            f"[]string{{{listed}}}"
        )
        causes.append(forbidden("metadata.finalizers", text))
    return causes


def _version_missing(target: Target, name: str) -> ApiError:
    text = "Invalid value: 0x0: must be specified for an update"
    cause = Cause("FieldValueInvalid", "metadata.resourceVersion", text)
    return invalid(target.kind.group, target.kind.plural, name, [cause])


def _options_invalid(path: str, message: str) -> ApiError:
    cause = Cause("FieldValueForbidden", path, f"Forbidden: {message}")
    return invalid("meta.k8s.io", "PatchOptions", "", [cause])


def _moves_generation(target: Target, old: Object, new: Object) -> bool:
    """True if the desired state changed (metadata and status are not part of it)."""
    if target.subresource == "status":
        return False
    ignored = {"metadata", "status", "apiVersion"}
    if target.kind.is_custom and not target.version.has_status:
        ignored = {"metadata", "apiVersion"}
    names = (old.keys() | new.keys()) - ignored
    return any(old.get(name) != new.get(name) for name in names)

"""Custom resource definitions at work: serving their kinds, and cleaning up behind them."""

from __future__ import annotations

from unbroken.local.apiserver.http.requests import Target
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.store import Entry, Store
from unbroken.local.apiserver.write.deletion import CRD_CLEANUP, DeleteOptions
from unbroken.local.apiserver.write.writes import CRD_RESOURCE as RESOURCE
from unbroken.local.apiserver.write.writes import Result, WriteContext, Writer

from . import crds
from .kinds import Catalogue, Kind


class Definitions:
    """Keeps the catalogue in step with the stored definitions."""

    def __init__(
        self, store: Store, catalogue: Catalogue, writer: Writer, around: WriteContext
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._writer = writer
        self._context = around

    def load(self) -> None:
        """Serve every stored definition."""
        for entry in self._store.collection(RESOURCE).entries.values():
            self._serve(entry.decode())

    def delete(self, target: Target, entry: Entry, options: DeleteOptions) -> Result:
        """Delete an object; a definition takes its objects with it before it goes."""
        result = self._writer.delete(target, entry, options)
        self.after(target, result)
        return result

    def after(self, target: Target, result: Result) -> None:
        """Do what follows from a write."""
        if target.kind.resource == RESOURCE:
            self._definition_changed(result)
        elif target.kind.is_custom and result.is_gone:
            definition = self._store.collection(RESOURCE).entries.get(("", target.kind.resource))
            if definition is not None:
                self._release(definition)

    def _definition_changed(self, result: Result) -> None:
        content = result.entry.decode()
        group, plural = content["spec"]["group"], content["spec"]["names"]["plural"]
        if result.is_gone:
            self._catalogue.drop(group, plural)
            return
        if self._store.collection(RESOURCE).entries.get(result.entry.key) is not result.entry:
            return  # a dry run
        self._establish(content)
        result.entry = self._store.collection(RESOURCE).entries[result.entry.key]
        self._serve(result.entry.decode())
        if "deletionTimestamp" not in content["metadata"]:
            return
        kind = self._catalogue.resource(plural, group)
        if kind is not None:
            self._delete_objects(kind)
        self._release(result.entry)
        result.is_gone = result.entry.key not in self._store.collection(RESOURCE).entries

    def _serve(self, content: Object) -> None:
        if crds.is_established(content):
            self._catalogue.put(crds.kind_of(content))

    def _establish(self, content: Object) -> None:
        """Bring conditions, accepted names, stored versions and the finalizer up to date."""
        updated = crds.established(content, self._others(content), self._context.timestamp())
        finalizers = updated["metadata"].setdefault("finalizers", [])
        if "deletionTimestamp" not in updated["metadata"] and CRD_CLEANUP not in finalizers:
            finalizers.append(CRD_CLEANUP)
        if not finalizers:
            del updated["metadata"]["finalizers"]
        if updated != content:
            self._store.write(RESOURCE, ("", updated["metadata"]["name"]), updated)

    def _others(self, content: Object) -> list[Object]:
        name = content["metadata"]["name"]
        entries = self._store.collection(RESOURCE).entries.values()
        return [entry.decode() for entry in entries if entry.key[1] != name]

    def _delete_objects(self, kind: Kind) -> None:
        version = kind.versions[next(iter(kind.versions))]
        for key, entry in list(self._store.collection(kind.storage).entries.items()):
            self._writer.delete(Target(kind, version, *key), entry, DeleteOptions())

    def _release(self, entry: Entry) -> None:
        """Let a deleted definition go once it has no objects left."""
        content = entry.decode()
        meta = content["metadata"]
        if "deletionTimestamp" not in meta or CRD_CLEANUP not in meta.get("finalizers", []):
            return
        spec = content["spec"]
        resource = f"{spec['names']['plural']}.{spec['group']}"
        if self._store.collection(resource).entries:
            return
        meta["finalizers"].remove(CRD_CLEANUP)
        if meta["finalizers"]:
            self._store.write(RESOURCE, entry.key, content)
            return
        self._store.write(RESOURCE, entry.key, content, delete=True)
        self._catalogue.drop(spec["group"], spec["names"]["plural"])

"""Binds PersistentVolumeClaims to volumes, and makes directories into volumes where none fits.

Binding of claims to volumes, and treatment of a volume without a claim, are pure functions, after
kube-controller-manager v1.33, pkg/controller/volume/persistentvolume, without binding modes:
a claim is bound as soon as it is made.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from lightkube.resources.core_v1 import PersistentVolume, PersistentVolumeClaim, Pod

from unbroken.errors import SpecError, WorldError
from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import AlreadyExists, ApiRefusal, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.quantity import parse_quantity
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.scheduler.model import matches_labels
from unbroken.log_lines import Log
from unbroken.spec.keys import OWN_GROUP

PROVISIONER = f"{OWN_GROUP}/directory"
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
VOLUME_PROTECTION = "kubernetes.io/pv-protection"


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind the claim to this volume."""

    volume: PersistentVolume


@dataclass(frozen=True, slots=True)
class Provision:
    """Make a volume for the claim."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done yet; `reason` and `message` are for an event, if any."""

    reason: str = ""
    message: str = ""


def bind(
    claim: PersistentVolumeClaim, volumes: Iterable[PersistentVolume]
) -> Bind | Provision | Wait:
    """Return the action for a claim that is not bound."""
    assert claim.spec is not None
    volumes = list(volumes)
    if claim.spec.volumeName:
        return _named(claim, claim.spec.volumeName, volumes)
    own = [volume for volume in volumes if is_claimed_by(volume, claim)]
    if own:
        # Reserved for the claim, or bound half-way by an earlier run.
        return Bind(own[0])
    fitting = [volume for volume in volumes if is_free(volume) and fits(volume, claim)]
    if fitting:
        return Bind(
            min(
                fitting,
                key=lambda persistent_volume: (
                    capacity(persistent_volume),
                    key_of(persistent_volume).name,
                ),
            )
        )
    if storage_class(claim) == "":
        return Wait(
            "FailedBinding",
            "no persistent volumes available for this claim and no storage class is set",
        )
    return Provision()


def _named(
    claim: PersistentVolumeClaim, name: str, volumes: Iterable[PersistentVolume]
) -> Bind | Wait:
    for volume in volumes:
        if key_of(volume).name != name:
            continue
        if is_claimed_by(volume, claim):
            return Bind(volume)
        if not is_free(volume):
            return Wait("FailedBinding", f'volume "{name}" already bound to a different claim.')
        if not fits(volume, claim, ignore_selector=True):
            return Wait(
                "VolumeMismatch",
                f'Cannot bind to requested volume "{name}": size, access modes, volume mode or '
                "storage class do not match",
            )
        return Bind(volume)
    return Wait()


def storage_class(item: PersistentVolumeClaim | PersistentVolume) -> str | None:
    """The class by name; empty: none on purpose; None: whatever is the default."""
    return item.spec.storageClassName if item.spec else None


def is_claimed_by(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """The volume names this very claim, or reserves itself for one of its name."""
    reference = volume.spec.claimRef if volume.spec else None
    if reference is None or claim.metadata is None:
        return False
    key = key_of(claim)
    return (reference.namespace, reference.name) == (key.namespace, key.name) and (
        not reference.uid or reference.uid == claim.metadata.uid
    )


def is_free(volume: PersistentVolume) -> bool:
    """True if the volume is not claimed."""
    deleting = volume.metadata is not None and volume.metadata.deletionTimestamp is not None
    return volume.spec is not None and volume.spec.claimRef is None and not deleting


def fits(
    volume: PersistentVolume, claim: PersistentVolumeClaim, *, ignore_selector: bool = False
) -> bool:
    """Size, access modes, mode, class and labels are as the claim wants them."""
    wanted, offered = claim.spec, volume.spec
    assert wanted is not None
    assert offered is not None
    if (storage_class(volume) or "") != (storage_class(claim) or ""):
        return False
    if not set(wanted.accessModes or ()) <= set(offered.accessModes or ()):
        return False
    if (wanted.volumeMode or "Filesystem") != (offered.volumeMode or "Filesystem"):
        return False
    if wanted.selector is not None and not ignore_selector:
        labels = (volume.metadata and volume.metadata.labels) or {}
        if not matches_labels(wanted.selector, labels):
            return False
    return capacity(volume) >= request(claim)


def capacity(volume: PersistentVolume) -> Decimal:
    """Bytes that a volume offers."""
    return _bytes((volume.spec.capacity or {}).get("storage") if volume.spec else None)


def request(claim: PersistentVolumeClaim) -> Decimal:
    """Bytes that a claim wants."""
    resources = claim.spec.resources if claim.spec else None
    return _bytes((resources.requests or {}).get("storage") if resources else None)


def _bytes(text: str | None) -> Decimal:
    try:
        return parse_quantity(text or "0")
    except SpecError:
        return Decimal(0)


def is_provisioned(volume: PersistentVolume) -> bool:
    """The volume is one of ours: its directory may be removed with it."""
    annotations = (volume.metadata and volume.metadata.annotations) or {}
    return annotations.get(PROVISIONED_BY) == PROVISIONER


def directory_name(claim: PersistentVolumeClaim) -> str:
    """Return the directory of a claim's volume, below that of all volumes.

    Namespaces and claims have no underscore in their names, so no two claims share one. The uid
    separates a claim that was made again from its predecessor's data.
    """
    key = key_of(claim)
    uid = (claim.metadata and claim.metadata.uid) or ""
    return f"{key.namespace}_{key.name}_{uid[:8]}"


log = Log(__name__)

VOLUMES = "api/v1/persistentvolumes"


class VolumeBinder:
    """Binds claims, marks volumes, and removes what is reclaimed.

    One worker: two claims must not be given one volume.
    """

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        directory: Path,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._directory = directory
        self._claims = informers.of(PersistentVolumeClaim)
        self._volumes = informers.of(PersistentVolume)
        self._pods = informers.of(Pod)
        self._queue: WorkQueue[tuple[str, Key]] = WorkQueue("volume", self._look)

    async def run(self) -> None:
        """Bind until cancelled."""
        await all_synced(self._claims, self._volumes, self._pods)
        self._claims.subscribe(self._on_claim)
        self._volumes.subscribe(self._on_volume)
        self._pods.subscribe(self._on_pod)
        await self._queue.run()

    def _on_claim(
        self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None
    ) -> None:
        item = changed(old, new)
        self._queue.add(("claim", key_of(item)))
        if item.spec and item.spec.volumeName:
            self._queue.add(("volume", Key("", item.spec.volumeName)))

    def _on_volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        self._queue.add(("volume", key_of(changed(old, new))))
        for claim in self._claims.items():
            if claim.status is None or claim.status.phase != "Bound":
                self._queue.add(("claim", key_of(claim)))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        # Only a pod that ends matters: it may have held a claim that is being deleted.
        if old is None or (new is not None and not _is_done(new)):
            return
        for name in _claims_of(old):
            self._queue.add(("claim", Key(key_of(old).namespace, name)))

    async def _look(self, what: tuple[str, Key]) -> None:
        kind, key = what
        with suppress(NotFound):
            if kind == "claim":
                claim = self._claims.get(key.name, key.namespace)
                if claim is not None:
                    await self._look_at_claim(claim)
            else:
                volume = self._volumes.get(key.name)
                if volume is not None:
                    await self._look_at_volume(volume)

    async def _look_at_claim(self, claim: PersistentVolumeClaim) -> None:
        metadata = claim.metadata
        assert metadata is not None
        if metadata.deletionTimestamp is not None:
            await self._release_claim(claim)
        elif claim.status is None or claim.status.phase != "Bound":
            match bind(claim, self._volumes.items()):
                case Bind(volume):
                    await self._bind(claim, volume)
                case Provision():
                    await self._provision(claim)
                case Wait(reason, message):
                    if reason:
                        self._recorder.record(claim, "Normal", reason, message)

    async def _release_claim(self, claim: PersistentVolumeClaim) -> None:
        """Let a deleted claim go once no pod uses it."""
        metadata = claim.metadata
        assert metadata is not None
        key = key_of(claim)
        finalizers = metadata.finalizers or []
        used = any(
            key_of(pod).namespace == key.namespace
            and key.name in _claims_of(pod)
            and not _is_done(pod)
            for pod in self._pods.items()
        )
        if CLAIM_PROTECTION in finalizers and not used:
            await self._drop_finalizer(_claim_path(key), claim, CLAIM_PROTECTION)

    async def _drop_finalizer(self, path: str, item: HasMetadata, name: str) -> None:
        metadata = item.metadata
        assert metadata is not None
        left = [one for one in getattr(metadata, "finalizers", None) or () if one != name]
        body = {"metadata": {"finalizers": left or None}}
        await self._client.merge(path, body, version=metadata.resourceVersion)

    async def _provision(self, claim: PersistentVolumeClaim) -> None:
        assert claim.metadata is not None
        assert claim.spec is not None
        uid = claim.metadata.uid
        path = self._directory / directory_name(claim)
        await asyncio.to_thread(path.mkdir, mode=0o700, parents=True, exist_ok=True)
        wanted = claim.spec
        requests = wanted.resources.requests if wanted.resources else None
        body: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"pvc-{uid}", "annotations": {PROVISIONED_BY: PROVISIONER}},
            "spec": {
                "capacity": {"storage": (requests or {}).get("storage", "0")},
                "accessModes": wanted.accessModes,
                "volumeMode": wanted.volumeMode or "Filesystem",
                "persistentVolumeReclaimPolicy": "Delete",
                "hostPath": {"path": str(path), "type": "DirectoryOrCreate"},
                "claimRef": _reference(claim),
                **(
                    {"storageClassName": wanted.storageClassName} if wanted.storageClassName else {}
                ),
            },
        }
        try:
            await self._client.raw("POST", VOLUMES, body=body)
        except AlreadyExists:
            return  # An earlier run created it; the informer will see it.
        except ApiRefusal as error:
            self._recorder.record(claim, "Warning", "ProvisioningFailed", str(error))
            raise
        log.info("volume provisioned", claim=key_of(claim), file=path)
        message = f"Successfully provisioned volume pvc-{uid}"
        self._recorder.record(claim, "Normal", "ProvisioningSucceeded", message)

    async def _bind(self, claim: PersistentVolumeClaim, volume: PersistentVolume) -> None:
        assert volume.spec is not None
        assert volume.metadata is not None
        assert claim.metadata is not None
        assert claim.spec is not None
        name, key = key_of(volume).name, key_of(claim)
        reference = volume.spec.claimRef
        if reference is None or reference.uid != claim.metadata.uid:
            claimed = {"spec": {"claimRef": _reference(claim)}}
            version = volume.metadata.resourceVersion
            await self._client.merge(f"{VOLUMES}/{name}", claimed, version=version)
        await self._mark_volume(name, "Bound")
        if claim.spec.volumeName != name:
            annotations = {
                "pv.kubernetes.io/bind-completed": "yes",
                "pv.kubernetes.io/bound-by-controller": "yes",
            }
            body = {"metadata": {"annotations": annotations}, "spec": {"volumeName": name}}
            await self._client.merge(_claim_path(key), body)
        status: Object = {
            "phase": "Bound",
            "accessModes": volume.spec.accessModes,
            "capacity": volume.spec.capacity,
        }
        await self._client.merge(f"{_claim_path(key)}/status", {"status": status})
        log.info("volume bound", claim=key, volume=name)

    async def _mark_volume(self, name: str, phase: str) -> None:
        await self._client.merge(f"{VOLUMES}/{name}/status", {"status": {"phase": phase}})

    async def _look_at_volume(self, volume: PersistentVolume) -> None:
        assert volume.spec is not None
        assert volume.metadata is not None
        name = key_of(volume).name
        phase = (volume.status and volume.status.phase) or "Pending"
        reference = volume.spec.claimRef
        claim = reference and self._claims.get(reference.name or "", reference.namespace)
        is_bound = bool(claim and reference and reference.uid and is_claimed_by(volume, claim))
        deleting = volume.metadata.deletionTimestamp is not None
        if deleting and not is_bound:
            await self._forget_volume(volume)
        elif reference is None or not reference.uid:
            if phase != "Available" and not deleting:
                await self._mark_volume(name, "Available")
        elif not is_bound:
            await self._reclaim(volume, phase)

    async def _reclaim(self, volume: PersistentVolume, phase: str) -> None:
        """The claim of the volume is gone."""
        assert volume.spec is not None
        reference = volume.spec.claimRef
        assert reference is not None
        name = key_of(volume).name
        path = _claim_path(Key(reference.namespace or "", reference.name or ""))
        if await self._exists(path, reference.uid or ""):
            raise WorldError(f"the claim of volume {name} is there, but not seen yet", 0.5)
        if phase != "Released":
            await self._mark_volume(name, "Released")
        if volume.spec.persistentVolumeReclaimPolicy == "Delete" and is_provisioned(volume):
            # The directory first: without its volume it would never be removed.
            await asyncio.to_thread(self._remove_directory, volume)
            await self._client.raw("DELETE", f"{VOLUMES}/{name}")

    async def _exists(self, path: str, uid: str) -> bool:
        result = await self._client.get_or_none(path, Object)
        return result is not None and result["metadata"]["uid"] == uid

    async def _forget_volume(self, volume: PersistentVolume) -> None:
        assert volume.metadata is not None
        if VOLUME_PROTECTION in (volume.metadata.finalizers or ()):
            path = f"{VOLUMES}/{key_of(volume).name}"
            await self._drop_finalizer(path, volume, VOLUME_PROTECTION)

    def _remove_directory(self, volume: PersistentVolume) -> None:
        assert volume.spec is not None
        if volume.spec.hostPath is None:
            return
        path = Path(volume.spec.hostPath.path)
        # Someone may have edited the object: nothing outside of our own directory is removed.
        if path.parent != self._directory or path.is_symlink():
            log.warning(
                "directory of a volume kept: not one of ours", volume=key_of(volume).name, file=path
            )
            return
        shutil.rmtree(path, ignore_errors=True)
        log.info("directory of a volume removed", volume=key_of(volume).name, file=path)


def _claims_of(pod: Pod) -> list[str]:
    return [
        volume.persistentVolumeClaim.claimName
        for volume in (pod.spec and pod.spec.volumes) or ()
        if volume.persistentVolumeClaim is not None
    ]


def _is_done(pod: Pod) -> bool:
    return pod.status is not None and pod.status.phase in ("Succeeded", "Failed")


def _claim_path(key: Key) -> str:
    return f"api/v1/namespaces/{key.namespace}/persistentvolumeclaims/{key.name}"


def _reference(claim: PersistentVolumeClaim) -> Object:
    key = key_of(claim)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": key.namespace,
        "name": key.name,
        "uid": claim.metadata.uid if claim.metadata else None,
    }

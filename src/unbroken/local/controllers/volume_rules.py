"""Binding of claims to volumes, and treatment of a volume without a claim. Pure.

After kube-controller-manager v1.33, pkg/controller/volume/persistentvolume, without binding modes:
a claim is bound as soon as it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from lightkube.resources.core_v1 import PersistentVolume, PersistentVolumeClaim

from unbroken.errors import SpecError
from unbroken.kube.cache import key_of
from unbroken.kube.quantity import parse_quantity
from unbroken.local.scheduler.selectors import matches_labels
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

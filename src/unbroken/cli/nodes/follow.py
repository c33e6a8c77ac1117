"""Follows the repair of a node by its record.  Reads only."""

from __future__ import annotations

from collections.abc import Callable

from lightkube.generic_resource import create_global_resource

from unbroken.cli.connection import Cluster
from unbroken.cli.show import note
from unbroken.cli.watch import ClusterWatch
from unbroken.errors import WorldError
from unbroken.spec.job.incident import GROUP, VERSION
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec, RepairRecord

from .views import progress_line

RECORD = create_global_resource(GROUP, VERSION, NODE_RECORD.kind, NODE_RECORD.plural)
QUIET_SECONDS = 15.0
"""Time after which an order without a repair is an error: operators react within a second."""


async def follow(
    cluster: Cluster, name: str, holds: Callable[[NodeRecordSpec], RepairRecord | None]
) -> RepairRecord:
    """Return the repair that `holds` selects, once it has ended.

    Progress goes to standard error. WorldError if no operator takes the order.
    """
    watch = ClusterWatch(cluster)
    informer = watch.follow(RECORD, fields=f"metadata.name={name}")
    shown = ""
    async with watch:
        while True:
            record = next((NODE_RECORD.spec_of(item)[0] for item in informer.items()), None)
            repair_record = holds(record) if record is not None else None
            if repair_record is not None:
                line = progress_line(name, repair_record)
                if line != shown:
                    note(line)
                shown = line
                if repair_record.ended_at is not None:
                    return repair_record
            if not await watch.change(None if shown else QUIET_SECONDS):
                raise WorldError(
                    f"no operator has started the repair of {name} for {QUIET_SECONDS:.0f} s: is "
                    f"one running? The order stays on the node; see: unbroken nodes describe {name}"
                )

"""The operations that are offered; every other one of the service is refused with words."""

from __future__ import annotations

from collections.abc import Mapping

from .batches import (
    batch_add_cluster_nodes,
    batch_delete_cluster_nodes,
    batch_reboot_cluster_nodes,
    batch_replace_cluster_nodes,
)
from .calls import Handler
from .clusters import create_cluster, delete_cluster, update_cluster, update_cluster_software
from .descriptions import describe_cluster, list_clusters
from .events import (
    describe_cluster_event,
    describe_cluster_operation,
    list_cluster_events,
    list_cluster_operations,
    start_cluster_health_check,
)
from .nodes import describe_cluster_node, list_cluster_nodes
from .tags import add_tags, delete_tags, list_tags

HANDLERS: Mapping[str, Handler] = {
    "AddTags": add_tags,
    "BatchAddClusterNodes": batch_add_cluster_nodes,
    "BatchDeleteClusterNodes": batch_delete_cluster_nodes,
    "BatchRebootClusterNodes": batch_reboot_cluster_nodes,
    "BatchReplaceClusterNodes": batch_replace_cluster_nodes,
    "CreateCluster": create_cluster,
    "DeleteCluster": delete_cluster,
    "DeleteTags": delete_tags,
    "DescribeCluster": describe_cluster,
    "DescribeClusterEvent": describe_cluster_event,
    "DescribeClusterNode": describe_cluster_node,
    "DescribeClusterOperation": describe_cluster_operation,
    "ListClusterEvents": list_cluster_events,
    "ListClusterNodes": list_cluster_nodes,
    "ListClusterOperations": list_cluster_operations,
    "ListClusters": list_clusters,
    "ListTags": list_tags,
    "StartClusterHealthCheck": start_cluster_health_check,
    "UpdateCluster": update_cluster,
    "UpdateClusterSoftware": update_cluster_software,
}

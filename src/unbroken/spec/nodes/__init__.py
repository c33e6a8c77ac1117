"""Kinds about nodes: Machine, NodeCheck, NodeRecord, Cluster; keys and faults of nodes."""

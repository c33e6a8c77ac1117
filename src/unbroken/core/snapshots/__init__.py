"""Placement and replication of snapshots, and the checkpoints that a node holds."""

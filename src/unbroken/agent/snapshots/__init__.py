"""Snapshots in memory that outlives workers, copies of them on other nodes, and their messages."""

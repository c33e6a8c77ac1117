"""The memory of snapshots that outlives workers, and what workers say about it."""

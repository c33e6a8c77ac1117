"""The memory of snapshots that outlives workers, and the messages of workers about it."""

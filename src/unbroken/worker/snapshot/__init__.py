"""Snapshots of the training state in memory: saved, chosen by all ranks, restored."""

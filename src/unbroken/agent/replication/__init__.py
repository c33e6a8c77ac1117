"""Copies of snapshots on other nodes: agreed on, sent, kept, and fetched back."""

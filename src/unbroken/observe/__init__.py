"""Metrics of the cluster."""

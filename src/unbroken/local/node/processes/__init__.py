"""Processes of containers: launcher, supervisors, isolation, limits, logs."""

"""Decisions about RayClusters: their pods, service and status.  Pure."""

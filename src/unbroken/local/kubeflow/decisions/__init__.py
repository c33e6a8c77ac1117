"""Decisions about PyTorchJobs: their pods, services and status.  Pure."""

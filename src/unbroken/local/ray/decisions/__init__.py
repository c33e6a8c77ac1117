"""Decisions about RayClusters and RayJobs: pods, services, submissions and status.  Pure."""

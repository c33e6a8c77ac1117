"""Runs pods as process groups; speaks only the Kubernetes API."""

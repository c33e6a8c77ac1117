"""Metrics and traces: feeds `unbroken.observe` with the state in the API."""

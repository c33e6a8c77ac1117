"""Metrics and traces: feeds `unbroken.observe` with what the API says."""

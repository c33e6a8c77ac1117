"""The operator: it connects the Kubernetes API, the agents and the machines of the jobs.

Every decision about a job is made in `unbroken.core`; this package passes events in and carries
orders out.
"""

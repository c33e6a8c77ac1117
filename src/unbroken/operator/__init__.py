"""The operator: carries between the Kubernetes API, the agents and the machines of the jobs.

Every decision about a job is made in `unbroken.core`; here it is only told and obeyed.
"""

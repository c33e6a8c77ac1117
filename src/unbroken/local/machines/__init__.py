"""Machines of the local cluster: a node of processes for each Machine object."""

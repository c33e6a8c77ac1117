"""Pods of a node: the machine of a pod and its containers, and what carries it out."""

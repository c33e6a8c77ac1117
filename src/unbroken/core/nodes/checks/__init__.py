"""Checks of nodes: the tests to run on each node, and the verdict on their results."""

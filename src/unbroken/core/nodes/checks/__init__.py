"""Checks of nodes: which tests run where, and what their results amount to."""

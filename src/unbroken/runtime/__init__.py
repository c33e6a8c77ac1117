"""Runs machines: what the loops of all programs have in common."""

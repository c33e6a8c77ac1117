"""Schemas: validation, pruning and defaulting of values."""

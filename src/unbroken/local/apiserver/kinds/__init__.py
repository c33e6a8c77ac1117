"""Kinds that the API server serves: built-in ones, and custom ones."""

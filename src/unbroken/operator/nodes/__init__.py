"""Nodes: their repair and their checks, by objects of the API."""

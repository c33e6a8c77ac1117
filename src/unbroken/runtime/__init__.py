"""Driving of machines: the shared part of all programs' loops."""

"""Decisions about machines: places, lifecycle scripts, what is next.  Pure."""

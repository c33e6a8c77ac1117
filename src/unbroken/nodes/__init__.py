"""Programs that run on each node: the daemon that sees its faults, and the checks."""

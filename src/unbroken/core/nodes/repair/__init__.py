"""The repairer of nodes: it decides which node is drained, reset, rebooted or replaced, and
when."""

"""The repairer of nodes: which node is drained, reset, rebooted or replaced, and when."""

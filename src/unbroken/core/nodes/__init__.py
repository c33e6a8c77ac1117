"""Health of nodes: kernel log and readings, signals of a fault, blame."""

"""Commands about nodes: their record, repair, checks, faults, and the node daemon."""

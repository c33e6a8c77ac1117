"""Actors of the simulated world: operators, agents, links, nodes, and training."""

"""Jobs of a cluster: a runner, links to the agents, and a status writer for each."""

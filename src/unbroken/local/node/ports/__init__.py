"""Port forwarding: connections from a client of the API to ports of a pod."""

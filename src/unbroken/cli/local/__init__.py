"""Commands about the local cluster: up, down, status, chaos."""
